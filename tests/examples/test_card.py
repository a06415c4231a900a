from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.translation.card import Quality, Training, figures, replaced, sentence_table
from examples.translation.first_words import copies_summary, read_judgements, visitors_table
from examples.translation.ship import EIGHT_BITS, FLOAT, chosen

CARD = "# A model\n\n<!-- figures -->\nold\n<!-- end of figures -->\n\nWritten by hand.\n"


def test_only_the_part_changes() -> None:
    once = replaced(CARD, "figures", "new\n")
    assert once == CARD.replace("old", "new")
    assert replaced(once, "figures", "new") == once


@pytest.mark.parametrize("card", ["", CARD + CARD, "<!-- figures -->"])
def test_a_card_without_the_marks_is_refused(card: str) -> None:
    with pytest.raises(ValueError, match="must have <!-- figures -->"):
        replaced(card, "figures", "new")


def test_the_figures(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    entries: list[dict[str, object]] = [
        {"seconds": 0, "step": 0, "tokens": 0, "bleu": 1.0, "perplexity": 99.0},
        {"seconds": 5400, "step": 2000, "tokens": 7_800_000, "bleu": 18.14, "perplexity": 10.77},
        {"seconds": 5500, "step": 2050, "tokens": 7_900_000, "train_loss": 3.0},
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    measured = {"float": {1: Quality(18.3, 47.71), 4: Quality(19.83, 49.2)}, "small": {4: Quality(19.775, 49.1)}}
    text = figures(1000, measured, "small", 8.34, Training.read(log))
    assert "| BLEU / chrF, 1,000 test lines | beam 1 | beam 4 |" in text
    assert "| float | 18.30 / 47.7 | 19.83 / 49.2 |" in text
    assert "| **small, as shipped** |  | 19.77 / 49.1 |" in text
    assert "| Training | 2,000 steps, 7.8 million target tokens, 1.5 hours" in text
    assert "| Size | 8.3 MB in all |" in text
    elsewhere = {"500 lines of chat": {1: Quality(30, 50), 4: Quality(31, 51)}}
    more = figures(1000, measured, "small", 8.34, Training.read(log), elsewhere)
    assert "| as shipped, 500 lines of chat | 30.00 / 50.0 | 31.00 / 51.0 |" in more


def test_a_bar_in_a_sentence_stays_in_its_cell() -> None:
    assert sentence_table(["a | b"], ["c"]).splitlines()[-1] == "| 1 | a \\| b | c |"


@pytest.mark.parametrize(("small", "expected"), [(19.71, EIGHT_BITS), (19.7, FLOAT), (20.5, EIGHT_BITS)])
def test_eight_bits_are_shipped_where_they_cost_little(small: float, expected: str) -> None:
    assert chosen({FLOAT: {4: Quality(20.0, 50)}, EIGHT_BITS: {4: Quality(small, 50)}}) == expected


def test_visitors_are_counted_by_what_a_reader_said(tmp_path: Path) -> None:
    judgements = tmp_path / "judgements.tsv"
    judgements.write_text("Hello\tHallo\tright\nBye\tBei\twrong\n")
    given = (["Hello", "Bye", "Hm"], ["Hallo", "Bei", "Hmm"], read_judgements(judgements), frozenset({"Hello"}))
    table = visitors_table(*given).splitlines()
    assert table[0] == "| | of 3 | of the 2 that no training has seen |"
    assert table[2:6] == [
        "| right | 1 | 0 |",
        "| understood, with a mistake | 0 | 0 |",
        "| wrong | 1 | 1 |",
        "| not judged | 1 | 1 |",
    ]
    assert table[-3:] == [
        "| 1 | Hello | Hallo | right |",
        "| 2 | Bye * | Bei | wrong |",
        "| 3 | Hm * | Hmm | not judged |",
    ]
    judgements.write_text("Hello\tHallo\tgood\n")
    with pytest.raises(ValueError, match="says 'good'; a verdict is one of right, flawed, wrong"):
        read_judgements(judgements)


def test_strings_that_are_changed_are_named() -> None:
    assert copies_summary(["%s", "a|b"], ["%s", "a|b"]) == "2 of 2 strings come through as they are."
    assert copies_summary(["%s", "a|b"], ["%s", "c"]).endswith("```text\na|b  ->  c\n```")
