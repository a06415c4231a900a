"""Recurrent models, exported and served by the real engine, against a plain search over the model in PyTorch."""

from __future__ import annotations

import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from beamline.converters.families import converter_for
from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.tasks.generation import LoadedModel
from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from beamline.serving.contract.manifest import Manifest, StateKind, read_manifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis
from beamline.serving.engine.request import Request
from beamline.serving.engine.thread import EngineThread
from beamline.serving.errors import ComputeError
from beamline.serving.models.repository import verify
from tests.support.checkpoints import EOS, PAD, START
from tests.support.compiled import compile_lowered, compile_version
from tests.support.engines import Answer, arenas, decode, make_engine, results, step
from tests.support.fixture_cache import fixture_cache
from tests.support.plain_search import Found, plain_search, teacher_forced
from tests.support.processes import serving
from tests.support.recurrent import Shape, covering_shapes, lively_recurrent, text_vocabulary, write_recurrent
from tests.support.recurrent_users import USER_MODELS, UserModel, user_model, write_user_model
from tests.support.ties import same_or_tie

GREEDY = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=14)
BEAM = replace(GREEDY, beam_size=4, num_hypotheses=4)
SAMPLE = {
    "bahdanau": Shape("gru", "additive", "concat", 1, "tanh", "previous", "tied"),
    "everything-odd": Shape("coupled-peepholes", "predictive", "bottom", 3, "top", "fed", "bare", residual=True),
}


@dataclass(frozen=True)
class Served:
    folder: Path
    manifest: Manifest
    loaded: LoadedModel


def convert(source: Path, repository: Path) -> Served:
    converter = converter_for(source)
    converter.convert("recurrent", repository)
    folder = repository / "recurrent" / "1"
    return Served(folder, read_manifest(folder), converter.load())


def convert_shape(shape: Shape, folder: Path) -> Served:
    fixture_cache().fill(folder, write_converted, shape=shape)
    version = folder / "repository" / "recurrent" / "1"
    return Served(version, read_manifest(version), converter_for(folder / "source").load())


def write_converted(folder: Path, shape: Shape) -> None:
    model = lively_recurrent(shape.config(text_vocabulary()))
    convert(write_recurrent(folder / "source", model), folder / "repository")


@pytest.fixture(scope="module", params=["bahdanau", pytest.param("everything-odd", marks=pytest.mark.full)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return convert_shape(SAMPLE[request.param], tmp_path_factory.mktemp(request.param))


def test_its_graphs_compile_for_tensorrt(served: Served) -> None:
    found = compile_version(served.folder)
    assert "RECURRENCE" in found["encoder"][0].layers


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float16", "int8", "int4"])
def test_its_graphs_compile_in_other_precisions(served: Served, precision: str, tmp_path: Path) -> None:
    compile_lowered(served.folder, tmp_path / "lowered", precision)


def sources(lengths: list[int], seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, text_vocabulary()) for _ in range(length)] for length in lengths]


def check_certificate(served: Served) -> None:
    parity = json.loads((served.folder / "parity.json").read_text())
    assert parity["beam_exact_share"] == 1.0
    assert parity["max_log_prob_difference"] < 1e-4
    verify(served.folder, served.manifest)


def compare(found: Hypothesis, expected: Found, where: str) -> None:
    assert same_or_tie(found.tokens, found.token_log_probs, expected.tokens, expected.log_probs), (
        f"{where}: {found.tokens} is not {expected.tokens}"
    )
    if found.tokens == expected.tokens:
        np.testing.assert_allclose(found.token_log_probs, expected.log_probs, atol=1e-4, err_msg=where)
        if len(expected.tokens) > 1:
            assert found.score == pytest.approx(expected.score, abs=1e-4), where


def check_served(served: Served, lengths: list[int], batches: tuple[int, ...]) -> None:
    """Alone, and in batches of these sizes that others join and leave, greedy and beam search side by side."""
    check_certificate(served)
    requests = [(source, options) for source in sources(lengths) for options in (GREEDY, BEAM)]
    expected = [
        plain_search(teacher_forced(served.loaded.original, source), options, START, EOS)
        for source, options in requests
    ]
    engine = make_engine(served.folder, served.manifest, slots=1)
    runs = {"alone": [results(decode(engine, [request]))[0] for request in requests]}
    for size in batches:
        engine = make_engine(served.folder, served.manifest, slots=size)
        runs[f"batches of {size}"] = results(decode(engine, requests, stagger=size % 2))
    for name, answers in runs.items():
        for (source, options), answer, wanted in zip(requests, answers, expected, strict=True):
            where = f"{name}, beam {options.beam_size}, source of {len(source)}"
            assert len(answer.hypotheses) == len(wanted), where
            for mine, other in zip(answer.hypotheses, wanted, strict=True):
                compare(mine, other, where)


def test_served_is_what_pytorch_computes(served: Served) -> None:
    check_served(served, [1, 2, 3, 5, 8, 13, 21, 33, 50], batches=(3, 16))


def test_outputs_are_worth_comparing(served: Served) -> None:
    """They vary with the source, and some end by themselves."""
    engine = make_engine(served.folder, served.manifest)
    answers = results(decode(engine, [(source, BEAM) for source in sources([3, 6, 9, 12, 15, 18, 21, 24])]))
    found = [hypothesis for answer in answers for hypothesis in answer.hypotheses]
    assert len({answer.hypotheses[0].tokens for answer in answers}) >= 4
    assert len({hypothesis.tokens for hypothesis in found}) >= 16
    assert {hypothesis.finish_reason for hypothesis in found} == {FinishReason.EOS, FinishReason.LENGTH}


def test_alignments_come_out(served: Served) -> None:
    engine = make_engine(served.folder, served.manifest)
    (answer,) = results(decode(engine, [([5, 6, 7, 8], replace(BEAM, return_alignment=True))]))
    for hypothesis in answer.hypotheses:
        assert hypothesis.alignment is not None
        assert np.array(hypothesis.alignment).shape == (len(hypothesis.tokens), 4)
        np.testing.assert_allclose(np.array(hypothesis.alignment).sum(1), 1, atol=1e-5)


def test_a_poisoned_state_fails_its_request_alone(served: Served) -> None:
    """And the slot's next tenant begins with clean states."""
    engine = make_engine(served.folder, served.manifest, slots=2)
    long = replace(BEAM, min_length=13)
    expected = results(decode(engine, [([5, 6, 7], long), ([9, 8], BEAM)]))
    answers: dict[str, Answer] = {}

    def submit(name: str, source: tuple[int, ...], options: DecodingOptions) -> None:
        engine.submit(Request(source, options, lambda answer: answers.__setitem__(name, answer)))

    submit("kept", (5, 6, 7), long)
    submit("poisoned", (7, 7, 7), long)
    for _ in range(3):
        step(engine)
    name = served.manifest.tensors(StateKind.RECURRENT)[0].name
    arenas(engine)[name][1] = np.nan
    step(engine)
    assert isinstance(answers["poisoned"], ComputeError)
    submit("late", (9, 8), BEAM)
    while engine.busy:
        step(engine)
    for key, wanted in (("kept", expected[0]), ("late", expected[1])):
        (found,) = results([answers[key]])
        assert [hypothesis.tokens for hypothesis in found.hypotheses] == [h.tokens for h in wanted.hypotheses]


@pytest.mark.full
def test_a_users_model_is_served(tmp_path: Path) -> None:
    """Sutskever's shape, through the loader for torch.nn's state dicts: no attention, and nothing in memory at all."""
    kind = next(kind for kind in USER_MODELS if kind.__name__ == "Sutskever")
    served = convert(write_user_model(tmp_path / "source", user_model(kind)), tmp_path / "repository")
    assert served.manifest.family == "torch_recurrent"
    assert served.manifest.tensors(StateKind.MEMORY) == []
    check_served(served, [1, 4, 17, 40], batches=(5,))


class Observed:
    """An engine that notes the order of everybody's steps."""

    def __init__(self, name: str, folder: Path, order: list[str]) -> None:
        self.name = name
        self.engine: Engine = make_engine(folder, read_manifest(folder), slots=4)
        self.answers: dict[int, Answer] = {}
        self.done = threading.Event()

        def observe(stats: StepStats) -> None:
            if stats.active:
                order.append(name)

        self.engine.observe = observe

    def submit(self, requests: list[tuple[list[int], DecodingOptions]]) -> None:
        for number, (source, options) in enumerate(requests):

            def take(answer: Answer, number: int = number) -> None:
                self.answers[number] = answer
                if len(self.answers) == len(requests):
                    self.done.set()

            self.engine.submit(Request(tuple(source), options, take))


def test_a_recurrent_model_and_a_transformer_share_a_thread(served: Served, reference_version: Path) -> None:
    requests = [(source, options) for source in sources([3, 9, 20, 30]) for options in (GREEDY, BEAM)]
    folders = {"recurrent": served.folder, "transformer": reference_version}
    alone = {
        name: results(decode(make_engine(folder, read_manifest(folder)), requests)) for name, folder in folders.items()
    }
    order: list[str] = []
    engines = [Observed(name, folder, order) for name, folder in folders.items()]
    thread = EngineThread([each.engine for each in engines])
    for each in engines:
        each.submit(requests)  # before it starts, so that both have work from the first step on
    thread.start()
    try:
        for each in engines:
            assert each.done.wait(60)
    finally:
        thread.stop()
    assert set(order[:8]) == {
        "recurrent",
        "transformer",
    }  # they share time, not steps
    for each in engines:
        found = results([each.answers[number] for number in range(len(requests))])
        for mine, other in zip(found, alone[each.name], strict=True):
            for a, b in zip(mine.hypotheses, other.hypotheses, strict=True):
                assert same_or_tie(a.tokens, a.token_log_probs, b.tokens, b.token_log_probs)


@pytest.mark.parametrize("served", ["bahdanau"], indirect=True)
def test_one_server_answers_for_both_at_the_same_time(
    served: Served, reference_version: Path, pooled_repository: Path, tmp_path: Path
) -> None:
    """A real process over one repository; each answer is the one that is given when nobody else asks."""
    for version in (served.folder, reference_version, pooled_repository / "mood" / "1"):
        shutil.copytree(version, tmp_path / "repository" / version.parent.name / version.name)
    options = pb.DecodingOptions(beam_size=4, num_hypotheses=1, max_length=20, return_scores=True, return_tokens=True)
    texts = [
        f"{word} {number}" for number, word in enumerate(("the file", "a value", "one", "it is", "no name", "x y"))
    ]
    questions = [(name, text) for text in texts for name in ("recurrent", "reference", "mood")]

    with serving(tmp_path / "log", "--repo", str(tmp_path / "repository"), "--threads", "1") as server:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = InferenceStub(channel)

            def ask(question: tuple[str, str]) -> tuple[list[int], list[float]]:
                name, text = question
                inputs = [pb.Input(text=text)]
                if name == "mood":
                    labels = stub.Classify(pb.ClassifyRequest(model=name, inputs=inputs)).classifications[0].labels
                    return [label.index for label in labels], [label.probability for label in labels]
                request = pb.TranslateRequest(model=name, inputs=inputs, options=options)
                hypothesis = stub.Translate(request).translations[0].hypotheses[0]
                return [token.id for token in hypothesis.tokens], list(hypothesis.token_log_probs)

            quiet = [ask(question) for question in questions]
            with ThreadPoolExecutor(len(questions)) as crowd:
                together = list(crowd.map(ask, questions * 3))
        metrics = server.metrics()
    for (tokens, values), (other_tokens, other_values) in zip(quiet * 3, together, strict=True):
        assert same_or_tie(tokens, values, other_tokens, other_values)
    for name in ("recurrent", "reference", "mood"):
        assert metrics("beamline_requests_total", model=name, outcome="ok") == 4 * len(texts)


# -- the covering set ------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", covering_shapes(), ids=lambda shape: shape.name)
def test_every_shape_is_served(tmp_path: Path, shape: Shape) -> None:
    served = convert_shape(shape, tmp_path)
    check_served(served, list(range(1, 51)), batches=(1, 2, 7, 16))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", USER_MODELS, ids=lambda kind: kind.__name__)
def test_every_users_model_is_served(tmp_path: Path, kind: type[UserModel]) -> None:
    served = convert(write_user_model(tmp_path / "source", user_model(kind)), tmp_path / "repository")
    check_served(served, list(range(1, 41)), batches=(1, 2, 7, 16))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_gnmt_is_served(tmp_path: Path) -> None:
    size = text_vocabulary()
    config = RecurrentConfig.gnmt(
        width=16,
        source_vocab_size=size,
        target_vocab_size=size,
        pad_id=PAD,
        eos_id=EOS,
        decoder_start_id=START,
        max_positions=64,
    )
    source = write_recurrent(tmp_path / "source", lively_recurrent(config))
    check_served(convert(source, tmp_path / "repository"), list(range(1, 51)), batches=(1, 2, 7, 16))
