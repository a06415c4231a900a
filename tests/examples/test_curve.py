from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.translation.curve import main, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("highest", "last"), [(18.1, 20), (0.013, 0.015), (1.0, 1), (7.3, 8), (0.0, 1)])
def test_an_axis_ends_at_a_round_number(highest: float, last: float) -> None:
    found = ticks(highest)
    assert found[-1] == pytest.approx(last)
    assert len(found) <= 7


def test_every_validation_is_a_point_and_better_ones_are_higher(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "curve.svg"
    validations = [{"seconds": 3600.0 * n, "step": 500 * n, "bleu": bleu} for n, bleu in enumerate([3.0, 9.5, 9.0])]
    steps = [{"seconds": 10.0, "step": 5, "train_loss": 4.0}]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in [*validations, *steps]))
    main([str(log), "--out", str(out), "--title", "<mine> & yours"])
    picture = ElementTree.parse(out).getroot()
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"<mine> & yours", "9.0", "step 1,000"} <= set(texts)
    circles = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in picture.iter(f"{SVG}circle")]
    assert [x for x, _ in circles] == sorted(x for x, _ in circles)
    heights = [-y for _, y in circles]
    assert heights[0] < heights[2] < heights[1]


def test_a_run_without_a_validation_is_told(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(SystemExit, match="has no validation yet"):
        main([str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "curve.svg")])
