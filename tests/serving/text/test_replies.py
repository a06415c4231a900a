from __future__ import annotations

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis, Result, Timings, Trace
from beamline.serving.engine.request import Request
from beamline.serving.text.replies import ReplyBuilder, Wanted
from beamline.serving.text.splitting import Layout
from beamline.serving.text.token_bytes import ByteTokenizer
from beamline.serving.text.translation_inputs import PreparedInput
from tests.serving.doubles import ids

EVERYTHING = Wanted(scores=True, tokens=True, alignment=True)
NOTHING = Wanted(scores=False, tokens=False, alignment=False)


def request(prefix: str = "") -> Request:
    prefix_ids = tuple(ByteTokenizer().encode_prefix(prefix))
    return Request((4, 5, 2), DecodingOptions(beam_size=2, num_hypotheses=1, max_length=20, prefix=prefix_ids))


def result(
    *texts: str,
    score: float = -1.0,
    reason: FinishReason = FinishReason.EOS,
    timings: Timings = Timings(queue=0.001, encode=0.002, decode=0.003),  # noqa: B008
) -> Result:
    hypotheses = [
        Hypothesis(ids(text), (-0.5,) * (len(text) + 1), score - rank, reason, alignment=((0.25, 0.75),))
        for rank, text in enumerate(texts)
    ]
    return Result(tuple(hypotheses), timings)


def reply(prepared: PreparedInput, results: list[Result], wanted: Wanted = NOTHING) -> pb.Translation:
    return ReplyBuilder(ByteTokenizer(), ByteTokenizer()).translation(prepared, results, wanted)


def test_every_hypothesis_with_everything_that_is_known() -> None:
    answer = reply(PreparedInput((request(),)), [result("ab", "c")], EVERYTHING)
    first, second = answer.hypotheses
    assert (first.text, first.score, first.finish_reason) == ("ab", -1.0, pb.FINISH_REASON_EOS)
    assert [(token.id, token.piece) for token in first.tokens] == [(100, "a"), (101, "b"), (2, "</s>")]
    assert list(first.token_log_probs) == [-0.5, -0.5, -0.5]
    assert [list(row.weights) for row in first.alignment] == [[0.25, 0.75]]
    assert (second.text, second.score) == ("c", -2.0)
    assert (answer.source_tokens, answer.target_tokens) == (3, 3)
    assert answer.timings.queue_ms == pytest.approx(1)
    assert answer.timings.encode_ms == pytest.approx(2)
    assert answer.timings.decode_ms == pytest.approx(3)


def test_what_was_not_asked_for_is_left_out() -> None:
    (only,) = reply(PreparedInput((request(),)), [result("ab")]).hypotheses
    assert not only.HasField("score")
    assert [len(only.tokens), len(only.token_log_probs), len(only.alignment)] == [0, 0, 0]


def test_the_prefix_is_part_of_the_text_but_not_of_what_was_generated() -> None:
    (only,) = reply(PreparedInput((request("pre-"),)), [result("fix")], EVERYTHING).hypotheses
    assert only.text == "pre-fix"
    assert len(only.tokens) == len(only.token_log_probs) == 4


def test_parts_are_joined() -> None:
    layout = Layout(" ", ("A.", "B."), ("\n", "  "))
    results = [
        result("x", score=-1, timings=Timings(0.005, 0.001, 0.002)),
        result("yz", score=-2, reason=FinishReason.LENGTH, timings=Timings(0.001, 0.001, 0.002)),
    ]
    answer = reply(PreparedInput((request("p"), request()), layout), results, EVERYTHING)
    (only,) = answer.hypotheses
    assert only.text == " px\nyz  "
    assert only.score == -3.0
    assert [token.id for token in only.tokens] == [*ids("x"), *ids("yz")]
    assert len(only.token_log_probs) == 5
    assert only.finish_reason == pb.FINISH_REASON_LENGTH
    assert (answer.source_tokens, answer.target_tokens) == (6, 5)
    assert answer.timings.queue_ms == pytest.approx(5)
    assert answer.timings.decode_ms == pytest.approx(4)


def test_the_worst_finish_reason_is_the_time_limit() -> None:
    layout = Layout("", ("A.", "B.", "C."), (" ", " ", ""))
    reasons = [FinishReason.LENGTH, FinishReason.TIME_LIMIT, FinishReason.EOS]
    answer = reply(
        PreparedInput((request(), request(), request()), layout), [result("x", reason=reason) for reason in reasons]
    )
    assert answer.hypotheses[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT


def cut_hypotheses(temperature: float = 0.0, streamed: bool = False) -> pb.Translation:
    """In the order of the search, which knows no stop strings; cut, their scores are -1.5, -1, -0.5, -0.25 and -0.5."""
    rows = [
        ("ab!cdef", -1.5, FinishReason.EOS),
        ("xy", -1.0, FinishReason.EOS),
        ("u!v", -0.5, FinishReason.EOS),
        ("l", -0.25, FinishReason.TIME_LIMIT),
        ("u!w", -0.5, FinishReason.TIME_LIMIT),
    ]
    hypotheses = []
    for rank, (text, log_prob, reason) in enumerate(rows):
        tokens = ByteTokenizer().encode_prefix(text)
        score = -0.1 * rank if "!" in text else log_prob
        hypotheses.append(Hypothesis(tuple(tokens), (log_prob,) * len(tokens), score, reason))
    trace = Trace(5, temperature > 0, 1.0, (), tuple((1, rank) for rank in range(5)), False)
    options = DecodingOptions(beam_size=5, num_hypotheses=5, max_length=20, temperature=temperature)
    prepared = PreparedInput((Request((4, 5, 2), options),), stops=("!",))
    results = [Result(tuple(hypotheses), Timings(), trace=trace)]
    return ReplyBuilder(ByteTokenizer(), ByteTokenizer()).translation(prepared, results, EVERYTHING, streamed)


@pytest.mark.parametrize(
    ("temperature", "streamed", "order"),
    [
        (0.0, False, [2, 4, 1, 0, 3]),  # the one that ran out of time stays last, equal ones keep their order
        (0.0, True, [0, 2, 4, 1, 3]),  # the first was shown
        (1.0, False, [0, 1, 2, 3, 4]),  # samples
    ],
)
def test_hypotheses_that_were_cut_come_best_first(temperature: float, streamed: bool, order: list[int]) -> None:
    answer = cut_hypotheses(temperature, streamed)
    texts, scores = ["ab", "xy", "u", "l", "u"], [-1.5, -1.0, -0.5, -0.25, -0.5]
    assert [each.text for each in answer.hypotheses] == [texts[place] for place in order]
    assert [each.score for each in answer.hypotheses] == [scores[place] for place in order]
    assert [end.candidate for end in answer.search_traces[0].hypotheses] == order
    assert answer.target_tokens == [3, 2, 2, 1, 2][order[0]]


def test_white_space_around_a_text_of_one_part_is_kept() -> None:
    layout = Layout("\n", ("A.",), ("\n",))
    assert reply(PreparedInput((request(),), layout), [result("x")]).hypotheses[0].text == "\nx\n"
