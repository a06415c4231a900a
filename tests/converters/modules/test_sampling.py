"""Sampling as the step graph does it: the distribution, the filters' boundaries, and whom it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from beamline.converters.modules.search.beam_search import Beams
from beamline.converters.modules.search.sampling import WIDEST, Draws, alternatives, draw, follow_draws
from beamline.serving.engine.search.random_numbers import Uniforms

WORDS = 12
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -torch.inf])
LOG_PROBS = LOGITS.log_softmax(0)


def drawn(
    uniforms: Tensor,
    log_probs: Tensor = LOG_PROBS,
    temperature: float = 1.0,
    top_k: float | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """One word for each uniform number, all from the same distribution."""
    words = len(log_probs)
    settings = torch.tensor([[0.0, temperature, top_k or words, top_p, min_p]]).repeat(len(uniforms), 1)
    settings[:, 0] = uniforms
    tokens, _ = draw(log_probs[None, None], Draws(torch.zeros(len(uniforms), dtype=torch.long), settings))
    return tokens


def philox(count: int, seed: int = 1, sample: int = 0) -> Tensor:
    numbers = Uniforms(seed, sample)
    return torch.tensor([numbers.at(position) for position in range(count)])


def chi_square(tokens: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic over the words that can occur, and its degrees of freedom."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a word that has no probability was drawn"
    wanted = expected[possible].double() * len(tokens)
    return float(((counts[possible] - wanted) ** 2 / wanted).sum()), int(possible.sum()) - 1


def critical(freedom: int) -> float:
    """Wilson and Hilferty's approximation of the value that chance exceeds once in a thousand times."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3)


def hugging_face(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    scores = LOGITS[None]
    for warper in (
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ):
        scores = warper(None, scores)
    return scores[0].softmax(0)


SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 8, "top_p": 0.8, "min_p": 0.2},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.95},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_is_the_softmax_after_hugging_faces_filters(settings: dict[str, float]) -> None:
    tokens = drawn(philox(20_000), LOG_PROBS, **settings)
    expected = hugging_face(**settings)  # type: ignore[arg-type]
    statistic, freedom = chi_square(tokens, expected)
    if freedom:
        assert statistic < critical(freedom)
    else:
        assert (tokens == int(expected.argmax())).all()


def test_the_test_would_notice_another_distribution() -> None:
    tokens = drawn(philox(20_000), temperature=1.1)
    assert chi_square(tokens, hugging_face())[0] > critical(WORDS - 2)


def test_numbers_at_the_edges() -> None:
    largest = 1 - 2.0**-24
    assert drawn(torch.tensor([0.0, largest])).tolist() == [0, WORDS - 2]  # the last one has no probability
    flat = torch.zeros(4).log_softmax(0)
    just_below, at = 0.25 - 2.0**-24, 0.25
    assert drawn(torch.tensor([just_below, at, 0.5, 0.75, largest]), flat).tolist() == [0, 1, 2, 3, 3]


def test_top_k_keeps_ties_as_hugging_face_does() -> None:
    tied = torch.tensor([1.0, 1.0, 1.0, 0.0]).log_softmax(0)
    assert set(drawn(philox(500), tied, top_k=2).tolist()) == {0, 1, 2}
    assert set(drawn(philox(500), tied, top_k=4).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.9, 4), (1e-6, 1)]
)
def test_top_p_keeps_the_fewest_words_that_have_so_much(top_p: float, kept: int) -> None:
    """Shares of 1/2, 1/4, 1/8, 1/8: exact in binary, so a boundary is a boundary."""
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    expected = {0, 1, 2, 3} if kept >= 3 else set(range(kept))  # the last two are tied
    assert set(drawn(philox(500), shares.log(), top_p=top_p).tolist()) == expected


def test_min_p_compares_with_the_best_word() -> None:
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert set(drawn(philox(500), shares.log(), min_p=0.5).tolist()) == {0, 1}
    assert set(drawn(philox(500), shares.log(), min_p=0.51).tolist()) == {0}
    assert set(drawn(philox(500), shares.log(), min_p=1.0).tolist()) == {0}


def test_a_nucleus_wider_than_the_limit_is_cut_and_none_is_not() -> None:
    flat = torch.linspace(0, -1, 3 * WIDEST).log_softmax(0)
    cut = drawn(philox(3000), flat, top_p=0.999)
    assert int(cut.max()) < WIDEST
    assert int(cut.max()) > WIDEST * 0.9
    assert int(drawn(philox(3000), flat).max()) > 2.9 * WIDEST


def test_a_number_depends_on_seed_sample_and_position_only() -> None:
    one = Uniforms(7, 3)
    assert one.at(200) == Uniforms(7, 3).at(200)
    assert [one.at(position) for position in (3, 1, 2)] == [Uniforms(7, 3).at(position) for position in (3, 1, 2)]
    others = {Uniforms(seed, sample).at(5) for seed in (7, 8, 2**64 - 1) for sample in range(4)}
    assert len(others) == 12
    assert all(0 <= one.at(position) < 1 for position in range(500))


def test_samples_and_beams_share_a_batch() -> None:
    """Two rows of the second request are drawn; every other row stays as the search left it."""
    beams = Beams(torch.tensor([[5, 6], [7, 8]]), torch.zeros(2, 2) - 3, torch.tensor([[1, 0], [0, 0]]))
    scores = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]])
    log_probs = LOG_PROBS.expand(2, 2, WORDS)
    settings = torch.tensor([[0.0, 1.0, WORDS, 1.0, 0.0], [1 - 2.0**-24, 1.0, 3, 1.0, 0.0]])
    after = follow_draws(beams, scores, log_probs, Draws(torch.tensor([2, 3]), settings))
    assert after.tokens.tolist() == [[5, 6], [0, 2]]
    assert after.parents.tolist() == [[1, 0], [0, 1]]
    assert after.scores[0].tolist() == [-3, -3]
    assert after.scores[1].tolist() == pytest.approx([-0.5 + float(LOG_PROBS[0]), -0.25 + float(LOG_PROBS[2])])
    untouched = follow_draws(beams, scores, log_probs, Draws(torch.zeros(0, dtype=torch.long), torch.zeros(0, 5)))
    assert untouched.tokens.tolist() == beams.tokens.tolist()


def test_the_likeliest_words_of_the_rows_that_are_asked_for() -> None:
    rows = torch.stack([LOG_PROBS, LOG_PROBS.flip(0)])[None]
    log_probs, tokens = alternatives(rows, torch.tensor([1, 0]))
    assert tokens[0, :3].tolist() == [11, 10, 9]
    assert tokens[1, :3].tolist() == [0, 1, 2]
    assert log_probs[0, :3].tolist() == pytest.approx(LOG_PROBS[:3].tolist())
