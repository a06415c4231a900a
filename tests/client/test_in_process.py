"""A model in process: `beamline.load`, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from beamline import Client, LoadedModel, load, load_async
from beamline.errors import (
    BeamlineError,
    Cancelled,
    DeadlinePassed,
    InternalError,
    InvalidItem,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    Overloaded,
)
from beamline.serving.config import ServeConfig
from beamline.serving.engine.request import Request
from beamline.serving.errors import ComputeError
from beamline.serving.server import Server
from beamline.types import Message, TokenIds
from tests.client.callers import AsyncLoadedCaller, Caller, LoadedCaller, in_process, texts
from tests.serving.doubles import EngineDouble, echo, started
from tests.serving.fake_lm import GatedEngine
from tests.support.processes import ROOT, environment
from tests.support.shipped import shipped

EN_DE = ROOT / "model_repo" / "en-de"
NEWEST = shipped("en-de").name
LINES = [
    "Save the file.",
    "Click the button to save your changes.",
    "The window could not be opened, because another program is using it.",
    "Open.",
    "Do you want to delete this folder and everything in it?",
]

MakeLoaded = Callable[..., Caller]


@pytest.fixture(scope="module")
def en_de() -> Iterator[LoadedModel]:
    with load(EN_DE, threads=2) as model:
        yield model


@pytest.fixture(params=[LoadedCaller, AsyncLoadedCaller], ids=["LoadedModel", "AsyncLoadedModel"])
async def loaded(request: pytest.FixtureRequest) -> AsyncIterator[MakeLoaded]:
    """Makes models of both kinds around an engine, and closes them."""
    made: list[Caller] = []

    def make(engine: EngineDouble | GatedEngine, **options: Any) -> Caller:
        made.append(request.param(in_process(engine, **options)))
        return made[-1]

    yield make
    for each in made:
        await each.close()


class TestAnswers:
    async def test_they_are_a_servers(self, en_de: LoadedModel) -> None:
        def ask(model: Any) -> Any:
            return model.translate(LINES, beam_size=4, num_hypotheses=2, return_scores=True, return_tokens=True)

        config = ServeConfig(
            repository=EN_DE.parent, load=("en-de",), grpc_port=0, metrics_port=0, threads=1, engines=1
        )
        ours = await asyncio.to_thread(ask, en_de)
        scored: Any = await asyncio.to_thread(en_de.score, texts(ours), source=LINES)
        async with started(Server(config)) as server:
            client = Client(server.grpc_address)
            theirs = await asyncio.to_thread(ask, client)
            theirs_scored: Any = await asyncio.to_thread(client.score, texts(ours), source=LINES)
            await asyncio.to_thread(client.close)
        for mine, other in zip(ours, theirs, strict=True):
            assert [each.text for each in mine.hypotheses] == [each.text for each in other.hypotheses]
            assert [each.tokens for each in mine.hypotheses] == [each.tokens for each in other.hypotheses]
            assert [each.score for each in mine.hypotheses] == pytest.approx([each.score for each in other.hypotheses])
            assert (mine.model, mine.version) == (other.model, other.version) == ("en-de", NEWEST)
        assert [each.log_prob for each in scored] == pytest.approx([each.log_prob for each in theirs_scored], abs=1e-4)

    def test_many_threads_get_the_answers_of_one(self, en_de: LoadedModel) -> None:
        wanted = texts(en_de.translate(LINES))
        gate = threading.Barrier(6)

        def ask(thread: int) -> list[str]:
            gate.wait()
            if thread % 3 == 0:
                return [en_de.translate(line).text for line in LINES]
            if thread % 3 == 1:
                return ["".join(texts(list(en_de.translate_stream(line)))) for line in LINES]
            return texts(en_de.translate(LINES * 4))[-len(LINES) :]

        with ThreadPoolExecutor(6) as pool:
            for answers in pool.map(ask, range(6)):
                assert answers == wanted

    async def test_asyncio_gets_them_too(self, en_de: LoadedModel) -> None:
        """Also where a method that is not awaited is called on a loop that runs: it has a loop of its own."""
        wanted = texts(en_de.translate(LINES))
        together = await asyncio.gather(*(en_de.aio.translate(line) for line in LINES))
        assert texts(together) == wanted
        pieces = [piece async for piece in en_de.aio.translate_stream(LINES)]
        assert ["".join(piece.text for piece in pieces if piece.index == i) for i in range(len(LINES))] == wanted

    def test_a_string_gives_one_answer_and_a_list_a_list_of_any_length(self, en_de: LoadedModel) -> None:
        assert en_de.translate([]) == []
        assert texts(en_de.translate(line for line in ["Hello"] * 3)) == ["Hallo"] * 3
        assert en_de.translate("Hello").text == "Hallo"
        with in_process(EngineDouble()) as model:
            many = [f"text {number}" for number in range(3000)]
            assert texts(model.translate(many)) == many

    async def test_a_language_model(self, loaded: MakeLoaded) -> None:
        model = loaded(GatedEngine())
        found = await model("generate", "Once", max_tokens=8)
        several = await model("generate", ["Once", "Twice", TokenIds([70])], max_tokens=8)
        assert several[0].completions == found.completions
        assert len(several) == 3
        pieces = await model.pieces("generate_stream", "Once", max_tokens=8)
        assert "".join(texts(pieces)) == found.text
        assert pieces[-1].usage == found.usage
        chat = await model("chat", [Message("user", "Hi")], max_tokens=8)
        assert "".join(texts(await model.pieces("chat_stream", "Hi", max_tokens=8))) == chat.text
        with pytest.raises(InvalidRequest, match="is no language model: it translates"):
            await loaded(EngineDouble())("generate", "Once")

    def test_a_classifier(self, pooled_repository: Path) -> None:
        with load(pooled_repository / "mood") as model:
            one, other = model.classify(["good", "bad"])
            assert one.labels == model.classify("good").labels
            assert other.model == "mood"
            assert model.embed("good").values == pytest.approx(model.embed(["good", "bad"])[0].values)
            with pytest.raises(ModelNotFound, match="no model here translates; there is mood"):
                model.translate("good")


class TestFailures:
    async def test_a_bad_item_is_named_and_the_others_are_answered(self, loaded: MakeLoaded) -> None:
        model = loaded(EngineDouble())
        given = [*["a"] * 50, " ", *["b"] * 10]
        with pytest.raises(InvalidItem, match=r"^item 50 is empty; there is nothing to translate$") as found:
            await model("translate", given)
        assert found.value.index == 50
        answers = await model("translate", given, return_errors=True)
        assert [type(answer) for answer in answers if isinstance(answer, BeamlineError)] == [InvalidItem]
        assert texts(answers[:50] + answers[51:]) == given[:50] + given[51:]
        with pytest.raises(InvalidRequest, match=r"^the text is empty"):
            await model("translate", "")
        with pytest.raises(InvalidRequest, match=r"^beam_size is 99; this model allows 1 to 8"):
            await model("translate", given, beam_size=99, return_errors=True)
        with pytest.raises(ModelNotFound, match="there is no model 'other' here"):
            await model("translate", "a", model="other")
        with pytest.raises(InvalidItem):
            await model.pieces("translate_stream", ["a", ""])

    async def test_what_fails_inside_fails_alone(self, loaded: MakeLoaded) -> None:
        def answer(request: Request) -> Any:
            return ComputeError("not a number") if len(request.source) > 4 else echo(request)

        model = loaded(EngineDouble(answer=answer))
        answers = await model("translate", ["a", "longer", "b"], return_errors=True)
        assert [type(each) for each in answers] == [type(answers[0]), InternalError, type(answers[0])]
        with pytest.raises(InternalError, match="could not compute this request: not a number"):
            await model("translate", "longer")

    async def test_a_deadline_frees_the_slots(self, loaded: MakeLoaded) -> None:
        engine = EngineDouble(held=True)
        model = loaded(engine, timeout=600)
        for given in ("a", ["a"] * 40):
            with pytest.raises(DeadlinePassed, match=r"timeout of 0\.2 s"):
                await model("translate", given, timeout=0.2)
            await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))
        with pytest.raises(DeadlinePassed):
            await model("translate", ["a"] * 40, timeout=0.2, return_errors=True)
        with pytest.raises(DeadlinePassed):
            await model.pieces("translate_stream", "a", timeout=0.2)
        await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))

    async def test_a_stream_that_is_closed_is_cancelled(self, loaded: MakeLoaded) -> None:
        engine = GatedEngine(gate=True)
        model = loaded(engine)
        engine.permit(4)
        pieces = await model.pieces("generate_stream", "A long prompt that is echoed", first=1)
        assert len(pieces) == 1
        await engine.until(lambda _: len(engine.cancelled) == 1)
        engine.open()

    async def test_a_cancelled_task_cancels_its_items(self) -> None:
        engine = EngineDouble(held=True)
        async with in_process(engine).aio as model:
            for given in ("a", ["a"] * 40):
                before = len(engine.submitted)
                task = asyncio.ensure_future(model.translate(given))
                await engine.until(lambda before=before: len(engine.submitted) > before)  # type: ignore[misc]
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))

    @pytest.mark.parametrize("given", ["a", ["a"] * 40])
    async def test_closing_cancels_what_runs(self, loaded: MakeLoaded, given: Any) -> None:
        engine = EngineDouble(held=True)
        model = loaded(engine)
        task = asyncio.ensure_future(model("translate", given))
        stream = asyncio.ensure_future(model.pieces("translate_stream", "b"))
        await engine.until(lambda: len(engine.submitted) >= 2)
        await model.close()
        for each in (task, stream):
            with pytest.raises(Cancelled, match="this model is closed"):
                await each
        assert len(engine.cancelled) == len(engine.submitted)
        with pytest.raises(BeamlineError, match="this model is closed"):
            await model("translate", "a")
        with pytest.raises(BeamlineError, match="this model is closed"):
            await model.pieces("translate_stream", "a")
        await model.close()

    async def test_a_full_queue_refuses_one_and_makes_a_list_wait(self, loaded: MakeLoaded) -> None:
        engine = EngineDouble(held=True, capacity=3)
        model = loaded(engine)
        given = [str(number) for number in range(40)]
        task = asyncio.ensure_future(model("translate", given))
        refused = min(len(given), 2 * model.client._process.slots) - 3  # each of those that are under way is told once
        await engine.until(lambda: engine.waiting == 3 and engine.refused == refused)
        with pytest.raises(Overloaded, match="the queue is full"):
            await model("translate", "a")
        engine.release()
        assert texts(await task) == given

    async def test_what_waits_is_bounded_and_the_longest_comes_first(self, loaded: MakeLoaded) -> None:
        engine = EngineDouble(held=True)
        model = loaded(engine)
        given = ["x" * (1 + number % 30) for number in range(100)]
        task = asyncio.ensure_future(model("translate", given))
        await engine.until(lambda: engine.waiting == 8)  # twice its slots
        assert [len(request.source) for request in engine.submitted[:3]] == [31, 31, 31]
        engine.release()
        assert texts(await task) == given
        assert engine.most_waiting == 8


class TestLoading:
    def test_a_path_may_name_the_version(self) -> None:
        with load(EN_DE / NEWEST, threads=1, engines=1, slots=2) as model:
            assert (model.name, model.version, model.task) == ("en-de", NEWEST, "translate")
            assert repr(model) == f"<LoadedModel en-de version {NEWEST}>"

    @pytest.mark.parametrize(
        ("path", "options", "kind", "sentence"),
        [
            ("en-fr", {}, ModelNotFound, "there is no folder .*en-fr; beside it there is en-de, en-de-gru"),
            (".", {}, ModelNotFound, "it is a repository, give one of its models: en-de, en-de-gru"),
            ("en-de", {"version": 99}, ModelNotFound, f"has no version 99; there is {NEWEST}"),
            (f"en-de/{NEWEST}", {"version": 2}, ModelNotFound, "is one version, and version 2 was asked for"),
            ("en-de", {"version": "3"}, InvalidRequest, "version is '3'; it must be a whole number"),
            ("en-de", {"threads": -1}, InvalidRequest, "threads is -1; it must be a whole number, 0 or more"),
            ("en-de", {"device": "tpu"}, InvalidRequest, "device is 'tpu'; it must be one of auto, cpu, cuda"),
            ("en-de", {"timeout": 0}, InvalidRequest, "timeout is 0; it must be seconds"),
            ("en-de", {"threads": 1, "engines": 2}, ModelError, "is to have 2 engines, but there are 1 threads"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, path: str, options: dict[str, Any], kind: type[BeamlineError], sentence: str
    ) -> None:
        with pytest.raises(kind, match=sentence):
            load(EN_DE.parent / path, **options)

    def test_a_broken_version_is_named(self, tmp_path: Path) -> None:
        folder = tmp_path / "broken" / "1"
        folder.mkdir(parents=True)
        with pytest.raises(ModelError, match=r"manifest\.json does not exist"):
            load(tmp_path / "broken")

    def test_a_checkpoint_is_to_be_converted_first(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelNotFound, match="it is a checkpoint, convert it first: beamline convert "):
            load(tmp_path)

    def test_a_missing_runtime_is_a_sentence(self) -> None:
        code = (
            "import sys; sys.modules['onnxruntime'] = None\n"
            "from beamline import BeamlineError, load\n"
            "try: load('model_repo/en-de')\n"
            "except BeamlineError as error: print(error)"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
        assert done.stdout.startswith("beamline.load needs onnxruntime, which is not installed: in this project's ")
        assert "pip install '.[cpu]'" in done.stdout

    def test_serving_toml_counts_unless_something_else_is_asked_for(self, tmp_path: Path) -> None:
        model = tmp_path / "en-de"
        model.mkdir()
        (model / NEWEST).symlink_to(EN_DE / NEWEST)
        (model / "serving.toml").write_text("slots = 3\nengines = 1\nqueue = 1\n[defaults]\nmax_length = 4\n")
        with load(model) as by_file, load(model, slots=5) as asked:
            assert (by_file._process.slots, asked._process.slots) == (3, 5)
            answer = by_file.translate([LINES[1]] * 9)[8]  # more than the file's queue, which is for servers
            assert answer.hypotheses[0].finish_reason == "length"

    async def test_load_async_is_awaited(self) -> None:
        async with await load_async(EN_DE, threads=1, engines=1) as model:
            assert (await model.translate("Hello")).text == "Hallo"
