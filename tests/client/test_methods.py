"""Every method of both clients at real servers, against what the stubs get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beamline.errors import InvalidRequest, ModelNotFound
from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from beamline.types import ChatOptions, Features, Message, Model, ScoreOptions, TokenIds, TranslateOptions
from tests.client.callers import texts
from tests.client.conftest import MakeCaller
from tests.serving.doubles import EngineDouble, connected, running, started
from tests.serving.fake_lm import GatedEngine, serving
from tests.support.processes import ROOT
from tests.support.shipped import shipped

NEWEST = shipped("en-de").name


async def test_the_shipped_model_translates_at_the_target_of_the_environment(
    caller: MakeCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Click the button to save your changes."
    config = ServeConfig(
        repository=ROOT / "model_repo", grpc_port=0, metrics_port=0, threads=1, engines=1, load=("en-de",)
    )
    options: dict[str, Any] = {"beam_size": 4, "num_hypotheses": 2, "return_scores": True, "return_tokens": True}
    async with started(Server(config)) as server, connected(server) as stub:
        wanted = await stub.Translate(
            pb.TranslateRequest(
                model="en-de",
                inputs=[pb.Input(text=text)],
                options=pb.DecodingOptions(
                    **options, early_stopping=pb.EARLY_STOPPING_NEVER, length_penalty=0.5, return_alignment=True
                ),
            )
        )
        monkeypatch.setenv("BEAMLINE_TARGET", server.grpc_address)
        client = caller()
        found = await client(
            "translate", text, early_stopping="never", length_penalty=0.5, return_alignment=True, **options
        )
        pieces = await client.pieces("translate_stream", text)
        plain = await client("translate", text, model="en-de", version=int(NEWEST))
    oracle = wanted.translations[0]
    assert (found.model, found.version) == ("en-de", NEWEST)
    assert found.text == oracle.hypotheses[0].text
    assert [hypothesis.score for hypothesis in found.hypotheses] == [each.score for each in oracle.hypotheses]
    for ours, theirs in zip(found.hypotheses, oracle.hypotheses, strict=True):
        assert [(token.id, token.piece) for token in ours.tokens] == [(each.id, each.piece) for each in theirs.tokens]
        assert ours.token_log_probs == tuple(theirs.token_log_probs)
        assert ours.alignment == tuple(tuple(row.weights) for row in theirs.alignment)
        assert ours.alignment
        assert ours.finish_reason == "eos"
    assert (found.source_tokens, found.target_tokens) == (oracle.source_tokens, oracle.target_tokens)
    # How many there are depends on how fast they are read.
    assert "".join(texts(pieces)) == pieces[-1].translation.text == plain.text
    assert plain.score is None


async def test_translate_score_and_models(caller: MakeCaller) -> None:
    async with running(EngineDouble()) as server:
        client = caller(server.grpc_address)
        assert (await client("translate", "one text")).text == "one text"
        assert texts(await client("translate", ["one text"])) == ["one text"]
        assert texts(await client("translate", (text for text in ("a", "b")))) == ["a", "b"]
        assert await client("translate", []) == []
        assert (await client("translate", TokenIds([3 + ord("a"), 2]))).text == "a"
        pieces = await client.pieces("translate_stream", ["first", "second"])
        assert {piece.index: piece.translation.text for piece in pieces if piece.translation} == {
            0: "first",
            1: "second",
        }
        score = await client("score", "text", source="source")
        assert (score.log_prob, score.scored_tokens) == (-2.5, 5)
        assert score.tokens[0].log_prob == -0.5
        for sources in ("one", ["one", "each"]):
            assert [each.scored_tokens for each in await client("score", ["a", "bc"], source=sources)] == [2, 3]
        with pytest.raises(InvalidRequest, match="there are 3 sources for 2 texts"):
            await client("score", ["a", "b"], source=["a", "b", "c"])
        with pytest.raises(InvalidRequest, match=r"^the source is empty"):
            await client("score", "a", source="")
        assert await client("models") == [Model("fake", "1", "READY", "")]
        with pytest.raises(ModelNotFound, match="nonesuch"):
            await client("translate", "a", model="nonesuch")
        with pytest.raises(InvalidRequest, match="has features"):
            await client("translate", Features([[1.0, 2.0]]))


async def test_none_is_left_out(caller: MakeCaller) -> None:
    async with running(EngineDouble()) as server:
        client = caller(server.grpc_address)
        options = dict.fromkeys(TranslateOptions.__annotations__)
        assert (await client("translate", "a", **options)).text == "a"
        assert texts(await client.pieces("translate_stream", "a", **options)) == ["a"]
        assert (
            await client("score", "a", source="b", **dict.fromkeys(ScoreOptions.__annotations__))
        ).scored_tokens == 2
    async with serving(GatedEngine()) as server:
        client = caller(server.grpc_address)
        options = {**dict.fromkeys(ChatOptions.__annotations__), "max_tokens": 2}
        assert (await client("chat", "Hi", **options)).usage.generated_tokens == 2
        del options["add_generation_prompt"]
        assert (await client("generate", "Hi", **options)).usage.generated_tokens == 2


@pytest.mark.parametrize("given", [b"abc", {"abc": 1}, 3])
@pytest.mark.parametrize("method", ["translate", "generate", "chat", "score", "classify"])
async def test_what_is_no_list_of_texts_is_refused(caller: MakeCaller, method: str, given: object) -> None:
    with pytest.raises(InvalidRequest, match=f"is of type {type(given).__name__}; give a"):
        await caller("127.0.0.1:1")(method, given)


async def test_a_language_model_writes_and_chats(caller: MakeCaller) -> None:
    async with serving(GatedEngine()) as server, connected(server) as stub:
        client = caller(server.grpc_address)
        one = pb.GenerateRequest(text="Once", options=pb.GenerationOptions(max_tokens=8))
        wanted = (await stub.GenerateOnce(one)).generations[0].text
        found = await client("generate", "Once", max_tokens=8, return_tokens=True, return_log_probs=True)
        assert found.text == wanted
        assert (found.usage.prompt_tokens, found.usage.generated_tokens) == (5, len(found.completions[0].tokens))
        assert all(token.log_prob is not None for token in found.completions[0].tokens)
        several = await client("generate", ["Once", "Twice", TokenIds([70])], max_tokens=8)
        assert several[0].text == wanted
        assert len(several) == 3
        pieces = await client.pieces("generate_stream", "Once", max_tokens=8)
        assert "".join(texts(pieces)) == wanted
        assert pieces[-1].usage is not None
        assert pieces[-1].finish_reason is not None

        asked = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
        request = pb.GenerateRequest(chat=asked, options=pb.GenerationOptions(max_tokens=8))
        wanted = (await stub.GenerateOnce(request)).generations[0].text
        for messages in ("Hi", [Message("user", "Hi")], [{"role": "user", "content": "Hi"}]):
            assert (await client("chat", messages, max_tokens=8)).text == wanted
        assert "".join(texts(await client.pieces("chat_stream", "Hi", max_tokens=8))) == wanted
        longer = await client("chat", "Hi", max_tokens=8, add_generation_prompt=True)
        shorter = await client("chat", "Hi", max_tokens=8, add_generation_prompt=False)
        assert longer.usage.prompt_tokens > shorter.usage.prompt_tokens


async def test_a_classifier_labels_and_embeds(caller: MakeCaller, pooled_repository: Path) -> None:
    given = ["The file was found.", "No"]
    inputs = [pb.Input(text=text) for text in given]
    config = ServeConfig(repository=pooled_repository, grpc_port=0, metrics_port=0, threads=1)
    async with started(Server(config)) as server, connected(server) as stub:
        client = caller(server.grpc_address)
        labels = await stub.Classify(pb.ClassifyRequest(inputs=inputs))
        vectors = await stub.Embed(pb.EmbedRequest(inputs=inputs, pooling=pb.POOLING_MEAN, normalize=True))
        classified = await client("classify", given)
        best = await client("classify", given[0], top_k=1)
        embedded = await client("embed", given, pooling="mean", normalize=True)
        one = await client("embed", given[0], pooling="mean", normalize=True)
    assert [[(label.name, label.index) for label in each.labels] for each in classified] == [
        [(label.name, label.index) for label in each.labels] for each in labels.classifications
    ]
    assert best.label == classified[0].label
    assert len(best.labels) == 1
    assert (best.model, best.version) == ("mood", "1")
    for found, wanted in zip(embedded, vectors.embeddings, strict=True):
        assert found.values == pytest.approx(list(wanted.values), abs=1e-6)
    assert one.values == pytest.approx(embedded[0].values, abs=1e-6)
