from __future__ import annotations

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis, Result, Timings
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


def test_white_space_around_a_text_of_one_part_is_kept() -> None:
    layout = Layout("\n", ("A.",), ("\n",))
    assert reply(PreparedInput((request(),), layout), [result("x")]).hypotheses[0].text == "\nx\n"
