"""Generate, GenerateOnce, TranslateStream and Score through the real server and engine; the device echoes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.stats import StepStats
from beamline.serving.text.token_bytes import ByteTokenizer
from tests.serving.doubles import connected
from tests.serving.fake_lm import GatedEngine, serving

TEXT = "Grüße, 世界! 👋 done"


def asking(text: str = TEXT, **options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))


def prompt_ids(text: str) -> list[int]:
    return ByteTokenizer().encode_prefix(text)


def by_ids(text: str = TEXT, **options: Any) -> pb.GenerateRequest:
    """Without the end token that the byte tokenizer adds; so the echo is the whole text."""
    request = asking("", **options)
    request.token_ids.ids.extend(prompt_ids(text))
    return request


def _beyond(engine: GatedEngine, steps: int) -> Callable[[list[StepStats]], bool]:
    return lambda stats: engine.decoded_steps > steps


async def collect(call: Any) -> list[Any]:
    replies = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    if (code := await call.code()) is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details())
    return replies


def text_of(replies: list[pb.GenerateReply], index: int = 0) -> str:
    return "".join(reply.text for reply in replies if reply.index == index)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_text_comes_as_it_is_made_and_never_half_a_character() -> None:
    engine = GatedEngine(gate=True)
    async with serving(engine) as server, connected(server) as stub:
        call = stub.Generate(by_ids())
        texts: list[str] = []
        for number in range(len(prompt_ids(TEXT)) + 1):
            engine.permit(1)
            await engine.until(_beyond(engine, number))
            whole = bytes(token - 3 for token in prompt_ids(TEXT)[: number + 1]).decode("utf-8", errors="ignore")
            while "".join(texts) != whole:  # nothing is held back longer than it must be
                reply = await call.read()
                assert "\ufffd" not in reply.text
                texts.append(reply.text)
        last = await call.read()
    assert "".join(texts) == TEXT
    assert last.finish_reason == pb.FINISH_REASON_EOS
    assert (last.usage.prompt_tokens, last.usage.generated_tokens) == (26, 27)
    assert len(texts) == len(TEXT)


async def test_once_is_the_same_as_the_stream() -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        options: dict[str, Any] = {"n": 3, "temperature": 0.8, "seed": 4, "return_tokens": True, "top_log_probs": 2}
        replies = await collect(stub.Generate(by_ids(**options)))
        response = await stub.GenerateOnce(by_ids(**options))
    assert response.model == "echo"
    assert len(response.generations) == 3
    for index, generation in enumerate(response.generations):
        mine = [reply for reply in replies if reply.index == index]
        assert text_of(replies, index) == generation.text == TEXT
        assert [token for reply in mine for token in reply.tokens] == list(generation.tokens)
        assert mine[-1].finish_reason == generation.finish_reason == pb.FINISH_REASON_EOS
        assert generation.tokens[0].log_prob == pytest.approx(-0.1)
        assert len(generation.tokens[0].top) == 2
    assert [reply.HasField("usage") for reply in replies].count(True) == 1
    assert response.usage.generated_tokens == 3 * 27


@pytest.mark.parametrize("options", [{}, {"beam_size": 3, "n": 2}, {"temperature": 1.0}], ids=str)
async def test_a_stop_string_across_token_borders_ends_the_answer_before_it(options: dict[str, Any]) -> None:
    engine = GatedEngine()
    async with serving(engine) as server, connected(server) as stub:
        request = by_ids("one STO two STOP" + 400 * "x", stop=["STOP", "never"], **options)
        replies = await collect(stub.Generate(request))
        response = await stub.GenerateOnce(request)
    assert text_of(replies) == response.generations[0].text == "one STO two "
    assert response.generations[0].finish_reason == pb.FINISH_REASON_STOP
    assert response.usage.generated_tokens == (16 if options.get("n") != 2 else 32)
    assert engine.decoded_steps < 2 * 400  # the device stopped soon after


async def test_limits_of_length() -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        short = await stub.GenerateOnce(by_ids(max_tokens=3))
        error = await refused(stub.GenerateOnce(by_ids(max_tokens=5000)))
        long = await refused(stub.GenerateOnce(by_ids("x" * 4097)))
    assert short.generations[0].text == "Gr"  # the third byte is half a character
    assert short.generations[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "max_tokens is 5000; a prompt of 26 tokens, in a context of 4098, allows 1 to 4072"
    assert "this model reads at most 4096" in (long.details() or "")


async def test_a_talk_goes_through_the_chat_template() -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        chat = pb.Chat(
            messages=[pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi")]
        )
        begun = await stub.GenerateOnce(pb.GenerateRequest(chat=chat))
        chat.add_generation_prompt = False
        ended = await stub.GenerateOnce(pb.GenerateRequest(chat=chat))
        wrong = pb.Chat(messages=[pb.ChatMessage(role="pirate", content="Arr")])
        error = await refused(stub.GenerateOnce(pb.GenerateRequest(chat=wrong)))
    assert begun.generations[0].text == "<system>Be brief.<user>Hi<assistant>"
    assert ended.generations[0].text == "<system>Be brief.<user>Hi"
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "unknown role pirate" in (error.details() or "")


async def test_echo_puts_the_prompt_first_with_its_log_probabilities() -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        response = await stub.GenerateOnce(by_ids("abc", echo=True, return_log_probs=True))
    generation = response.generations[0]
    assert generation.text == "abcabc"
    assert [token.from_prompt for token in generation.tokens] == [True] * 3 + [False] * 4
    assert not generation.tokens[0].HasField("log_prob")  # nothing stands before it
    assert generation.tokens[1].log_prob == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (pb.GenerateRequest(), "the prompt is missing: give text, token_ids or chat"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat has 0 messages; give 1 to 1024"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="hello")])),
            "chat.messages[0] has no role; give system, user or assistant",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300])), "token_ids contains 300; this model's vocabulary"),
        (asking(temperature=-1), "temperature is -1; it must be a finite number from 0 to 100"),
        (asking(temperature=0.001), "it must be 0 (no sampling) or from 0.01 to 100"),
        (asking(top_p=0), "top_p is 0; it must be above 0, up to 1 (off)"),
        (asking(top_k=2000), "top_k is 2000; this model allows 0 to 1024"),
        (asking(min_p=1.5), "min_p is 1.5"),
        (asking(n=3), "only as many answers as beams, and beam_size is 1"),
        (asking(temperature=1, beam_size=2), "a beam search does not sample"),
        (asking(top_log_probs=21), "top_log_probs is 21; this model allows 0 to 20"),
        (asking(stop=[""]), "stop[0] has 0 characters; a stop string has 1 to 200"),
        (asking(stop=["x"] * 17), "stop has 17 strings; at most 16"),
        (asking(logit_bias={400: 1.0}), "logit_bias contains 400"),
        (asking(logit_bias={4: float("nan")}), "logit_bias of 4 is nan"),
        (asking(min_tokens=9, max_tokens=8), "min_tokens is 9; it may be up to max_tokens, which is 8 here"),
        (asking(top_p=1.5), "top_p is 1.5; it must be above 0, up to 1 (off)"),
        (asking(top_p=math.nan), "top_p is nan; it must be above 0, up to 1 (off)"),
    ],
)
async def test_what_is_not_allowed_is_refused_with_a_sentence(request_: pb.GenerateRequest, sentence: str) -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        once = await refused(stub.GenerateOnce(request_))
        stream = await refused(collect(stub.Generate(request_)))
    for error in (once, stream):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in (error.details() or "")


async def test_a_model_is_asked_for_what_it_does() -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        error = await refused(stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")])))
    assert "does not translate: it continues a prompt (generate)" in (error.details() or "")
    async with serving(GatedEngine("translate")) as server, connected(server) as stub:
        error = await refused(stub.GenerateOnce(asking()))
    assert "is no language model: it translates (translate)" in (error.details() or "")


# -- readers that leave, stop or are slow --------------------------------------------------------------------------


async def begin(engine: GatedEngine, stub: Any, text: str = 60 * "abc ", **options: Any) -> Any:
    """A stream of which something has been read."""
    call = stub.Generate(by_ids(text, **options))
    engine.permit(3)
    await call.read()
    return call


async def run_into_a_deadline(engine: GatedEngine, stub: Any) -> None:
    """On a busy machine a short one may be over before the engine has heard of the call: then, into a longer one."""
    seconds = 0.5
    while not engine.submitted:
        await refused(collect(stub.Generate(by_ids(60 * "abc "), timeout=seconds)))
        seconds *= 2


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_a_reader_that_leaves_frees_its_slot(how: str) -> None:
    engine = GatedEngine(slots=1, gate=True)
    async with serving(engine) as server, connected(server) as staying:
        async with connected(server) as leaving:
            if how == "deadline":
                engine.permit(2)
                await run_into_a_deadline(engine, leaving)
            else:
                call = await begin(engine, leaving)
            if how == "cancel":
                call.cancel()
        other = asyncio.ensure_future(staying.GenerateOnce(by_ids("next")))  # there is only one slot
        await engine.until(lambda _: bool(engine.cancelled))  # no step happens before the server has noticed
        engine.open()
        assert (await other).generations[0].text == "next"
        await engine.until(lambda stats: stats[-1].remaining == 0)
    assert engine.decoded_steps < 60


async def test_a_reader_that_stops_reading_frees_its_slot_and_holds_up_nobody() -> None:
    """The slow one's messages are large, so the connection is full after some of them; then tokens pile up here, to the
    limit. Others, before and after, are served meanwhile."""
    engine = GatedEngine(slots=2, gate=True)  # so that the first token is read before too many wait
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        serving(engine, max_unread_tokens=50) as server,
        connected(server, narrow) as slow,
        connected(server) as quick,
    ):
        stuck = slow.Generate(by_ids(2000 * "x", top_log_probs=20))
        engine.permit(3)
        await stuck.read()
        engine.open()
        answers = await asyncio.gather(*(quick.GenerateOnce(by_ids(f"quick {i}")) for i in range(6)))
        assert [answer.generations[0].text for answer in answers] == [f"quick {i}" for i in range(6)]
        await engine.until(lambda stats: stats[-1].remaining == 0)
        assert (await quick.GenerateOnce(by_ids("after"))).generations[0].text == "after"
        error = await refused(collect(stuck))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "more than 50 tokens were waiting to be read" in (error.details() or "")
    assert engine.decoded_steps < 2000


async def test_a_slow_reader_gets_everything_in_fewer_pieces() -> None:
    engine = GatedEngine(slots=2)
    async with serving(engine) as server, connected(server) as stub:
        call = stub.Generate(by_ids(2000 * "y"))
        first = await call.read()
        await engine.until(lambda stats: stats[-1].remaining == 0)  # the device is through; nothing was read since
        rest = await collect(call)
    assert first.text + text_of(rest) == 2000 * "y"
    assert len(rest) < 2000


# -- the others ----------------------------------------------------------------------------------------------------


async def test_a_translation_comes_in_pieces_and_then_whole() -> None:
    source = "Erster Satz über 世界. Zweiter Satz.\n\nDritter!"
    request = pb.TranslateRequest(
        inputs=[pb.Input(text="kurz"), pb.Input(text=source)],
        options=pb.DecodingOptions(beam_size=2, split_sentences=True, return_scores=True),
    )
    engine = GatedEngine("translate", slots=3, gate=True)
    async with serving(engine) as server, connected(server) as stub:
        reading = asyncio.ensure_future(collect(stub.TranslateStream(request)))
        for number in range(8):
            engine.permit(1)
            await engine.until(_beyond(engine, number))
        engine.open()
        replies = await reading
        whole = await stub.Translate(request)
    for number, translation in enumerate(whole.translations):
        mine = [reply for reply in replies if reply.input == number]
        assert "".join(reply.text for reply in mine) == translation.hypotheses[0].text
        assert [reply.HasField("translation") for reply in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].translation.hypotheses == translation.hypotheses
    assert whole.translations[1].hypotheses[0].text == source
    assert sum(reply.text != "" for reply in replies) > 3
    assert not any("\ufffd" in reply.text for reply in replies)


async def test_scores_are_by_token_and_in_order() -> None:
    texts = [pb.Input(text="abc"), pb.Input(token_ids=pb.TokenIds(ids=[5, 6, 7, 8]))]
    async with serving(GatedEngine()) as server, connected(server) as stub:
        response = await stub.Score(pb.ScoreRequest(texts=texts))
        with_source = await refused(stub.Score(pb.ScoreRequest(texts=texts, sources=[pb.Input(text="a")])))
        single = await stub.Score(pb.ScoreRequest(texts=[pb.Input(token_ids=pb.TokenIds(ids=[5]))]))
    assert [[token.id for token in score.tokens] for score in response.scores] == [[100, 101, 102, 2], [5, 6, 7, 8]]
    for score in response.scores:
        assert score.scored_tokens == 3
        assert score.log_prob == pytest.approx(-0.3)
        assert score.perplexity == pytest.approx(1.10517, abs=1e-4)
        assert [token.HasField("log_prob") for token in score.tokens] == [False, True, True, True]
    assert with_source.details() == "model echo has no source: leave sources empty"
    assert single.scores[0].scored_tokens == 1  # after the token that begins an empty prompt


async def test_a_translation_is_scored_with_its_source() -> None:
    texts = [pb.Input(text="ab"), pb.Input(text="c")]
    async with serving(GatedEngine("translate")) as server, connected(server) as stub:
        response = await stub.Score(pb.ScoreRequest(sources=[pb.Input(text="x")], texts=texts))
        error = await refused(stub.Score(pb.ScoreRequest(texts=texts)))
        empty = await refused(stub.Score(pb.ScoreRequest(sources=[pb.Input(text="x")])))
    assert [score.scored_tokens for score in response.scores] == [3, 2]  # with the end token
    assert "translates, and no source is given: say what the texts translate" in (error.details() or "")
    assert empty.details() == "the call has 0 texts; give 1 to 256"
