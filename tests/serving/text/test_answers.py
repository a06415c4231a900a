from __future__ import annotations

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.outputs import FinishReason, Hypothesis, Piece, Result, Timings, Trace
from beamline.serving.engine.request import Request
from beamline.serving.text.answers import Answer
from beamline.serving.text.generator import Generator
from beamline.serving.text.host_work import TextWorkers
from beamline.serving.text.model_card import card_of
from beamline.serving.text.token_bytes import ByteTokenizer
from tests.serving.doubles import EngineDouble

WANTED = pb.GenerationOptions(return_log_probs=True)


def hypothesis(text: str, log_prob: float = -1.0, score: float = -99.0) -> Hypothesis:
    tokens = tuple(ByteTokenizer().encode_prefix(text))
    return Hypothesis(tokens, (log_prob,) * len(tokens), score, FinishReason.EOS)


@pytest.mark.parametrize("streamed", [0, 2, 4])
@pytest.mark.parametrize("behind", ["", "c", "cdef"])
def test_the_score_is_that_of_what_a_stop_string_leaves(behind: str, streamed: int) -> None:
    """However far the engine went on, and however much had come before the end."""
    whole = hypothesis("ab!" + behind)
    answer = Answer(0, ByteTokenizer(), [5], ["!"], WANTED, length_penalty=2.0)
    if streamed:
        answer.take(Piece(0, whole.tokens[:streamed], whole.token_log_probs[:streamed]))
    answer.complete(whole)
    found = answer.whole()
    assert (found.text, len(found.tokens), found.finish_reason) == ("ab", 3, pb.FINISH_REASON_STOP)
    assert found.score == pytest.approx(-3 / 3**2)


def test_the_score_of_what_is_not_cut_is_the_engines() -> None:
    answer = Answer(0, ByteTokenizer(), [5], ["!"], WANTED, length_penalty=2.0)
    answer.complete(hypothesis("abc", score=-7.0))
    assert answer.whole().score == -7.0


@pytest.mark.parametrize("samples", [False, True])
async def test_beams_that_were_cut_come_best_first_and_samples_in_their_order(samples: bool) -> None:
    def beams(request: Request) -> Result:
        found = (
            hypothesis("ab!cde", -1.0, score=-0.5),
            hypothesis("xy", -0.7, score=-0.7),
            hypothesis("z!", -0.1, score=-0.8),
        )
        return Result(found, Timings(), trace=Trace(3, samples, 1.0, (), ((6, 0), (2, 1), (2, 0)), False))

    engine, tokenizer = EngineDouble(answer=beams), ByteTokenizer()
    engine.start()
    try:
        model = Generator(card_of(engine.manifest), engine, tokenizer, TextLimits(), TextWorkers())
        options = pb.GenerationOptions(stop=["!"], n=3, return_log_probs=True, max_tokens=9)
        options.MergeFrom(pb.GenerationOptions(temperature=1.0) if samples else pb.GenerationOptions(beam_size=3))
        response = await model.once(pb.GenerateRequest(text="a", options=options), None)
    finally:
        engine.stop()
    found = [(each.text, each.score) for each in response.generations]
    ends = [(end.step, end.candidate) for end in response.search_trace.hypotheses]
    texts, scores = ["ab", "xy", "z"], [-1.0, -0.7, -0.1]
    assert [text for text, _ in found] == (texts if samples else texts[::-1])
    assert [score for _, score in found] == pytest.approx(scores if samples else scores[::-1])
    assert ends == ([(6, 0), (2, 1), (2, 0)] if samples else [(2, 0), (2, 1), (6, 0)])
