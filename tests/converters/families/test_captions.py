"""Image captioning: the encoder's input is a grid of feature vectors, of any number of positions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from beamline.converters.families import converter_for
from beamline.converters.modules.recurrent.steps import RecurrentSteps
from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from beamline.serving.config import ServeConfig
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.server import Server
from beamline.serving.text.tokenizer import TextTokenizer
from tests.converters.test_unsupported import edit, reasons_of
from tests.serving.doubles import connected, started
from tests.support.captions import (
    EMBEDDING,
    EXAMPLE,
    FEATURES,
    LONGEST,
    as_ours,
    show_attend_tell,
    tutorial_decoder,
    write_captioner,
    write_tutorial,
)
from tests.support.checkpoints import EOS, START
from tests.support.compiled import compile_lowered, compile_version
from tests.support.engines import decode, make_engine, results
from tests.support.fixture_cache import fixture_cache
from tests.support.plain_search import Found, plain_search
from tests.support.ties import same_or_tie

GREEDY = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=12)
BEAM = replace(GREEDY, beam_size=4, num_hypotheses=4)


def images(rows: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((count, FEATURES)).astype(np.float32) * 1.5 for count in rows]


def told(model: nn.Module, image: np.ndarray, options: DecodingOptions) -> list[Found]:
    """What it says in PyTorch, by a plain search."""
    features = torch.from_numpy(image)

    def log_probs(sequences: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(features[None].expand(len(sequences), -1, -1), torch.ones(1), torch.tensor(sequences))
        return logits[:, -1].log_softmax(-1)  # type: ignore[no-any-return]

    return plain_search(log_probs, options, START, EOS)


@dataclass(frozen=True)
class Captioner:
    original: nn.Module
    repository: Path


def write_converted(folder: Path, kind: str) -> None:
    source = KINDS[kind][1](folder / "source")
    converter_for(source).convert("captions", folder / "repository")


# As they are trained, and as they are stored.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Path], Path]]] = {
    "paper": (show_attend_tell, write_captioner),
    "tutorial": (tutorial_decoder, write_tutorial),
}


@pytest.fixture(scope="module", params=["paper", pytest.param("tutorial", marks=pytest.mark.full)])
def captioner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    folder = fixture_cache().fill(
        tmp_path_factory.mktemp("captions"), write_converted, files=[EXAMPLE], kind=request.param
    )
    return Captioner(KINDS[request.param][0](), folder / "repository")


def padded_images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of three sizes, with captions; what stands behind an image's end does not matter."""
    mask = torch.arange(9)[None, :] < torch.tensor([4, 9, 1])[:, None]
    padded = torch.full((3, 9, FEATURES), 7.0)
    for row, image in enumerate(images((4, 9, 1))):
        padded[row, : len(image)] = torch.from_numpy(image)
    return padded, mask, torch.tensor([[START, 5, 9], [START, 8, 8], [START, 30, 4]])


def assert_each_alone(found: torch.Tensor, original: nn.Module) -> None:
    features, mask, target = padded_images()
    for row, there in enumerate(mask):
        expected = original(features[row : row + 1, there], mask, target[row : row + 1])[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_our_module_is_the_papers() -> None:
    theirs = show_attend_tell()
    assert_each_alone(as_ours(theirs)(*padded_images()), theirs)


@torch.no_grad()
def test_a_tutorials_is_mapped_by_its_config(tmp_path: Path) -> None:
    loaded = converter_for(write_tutorial(tmp_path)).load()
    assert isinstance(loaded.model, RecurrentSteps)
    for found in (loaded.original, loaded.model.model):
        assert_each_alone(found(*padded_images()), tutorial_decoder())


@torch.no_grad()
def test_features_through_a_projection_and_an_encoder(tmp_path: Path) -> None:
    """Frames of a video, say."""
    folder = write_tutorial(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["shrink.weight"], weights["shrink.bias"] = torch.randn(EMBEDDING, FEATURES), torch.randn(EMBEDDING)
    half = nn.LSTM(EMBEDDING, FEATURES // 2, bidirectional=True)
    weights |= {f"frames.{name}": tensor for name, tensor in half.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    edit(folder / "config.json", feature_projection="shrink", encoder="frames")
    loaded = converter_for(folder).load()
    assert isinstance(loaded.model, RecurrentSteps)
    found, expected = (model(*padded_images()) for model in (loaded.model.model, loaded.original))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_a_config_lacks(tmp_path: Path) -> None:
    folder = write_tutorial(tmp_path)
    edit(folder / "config.json", source_features=0)
    assert reasons_of(folder) == ["config.json: source_embedding is missing", "config.json: encoder is missing"]
    edit(folder / "config.json", source_features=FEATURES, source_embedding="embedding.weight")
    assert reasons_of(folder) == ["config.json: both source_embedding and source_features are given"]
    edit(folder / "config.json", source_embedding=None, source_features=4, context_gate=None)
    assert reasons_of(folder) == [
        "f_beta.bias is not a part of this architecture",
        "f_beta.weight is not a part of this architecture",
        "init_h.weight has shape [9, 6], but its configuration says [9, 4]",
        "init_c.weight has shape [9, 6], but its configuration says [9, 4]",
        "decode_step.weight_ih has shape [36, 13], but its configuration says [36, 11]",
        "attention.encoder_att.weight has shape [5, 6], but its configuration says [5, 4]",
    ]


def test_captions_are_the_originals(captioner: Captioner) -> None:
    """Grids of different sizes, greedy and beam search side by side."""
    version = captioner.repository / "captions" / "1"
    manifest = read_manifest(version)
    assert manifest.feature_width == FEATURES
    assert json.loads((version / "parity.json").read_text())["beam_exact_share"] == 1.0
    requests = [(image, options) for image in images((1, 49, 4, 16, 9, 33)) for options in (GREEDY, BEAM)]
    expected = [told(captioner.original, image, options) for image, options in requests]
    assert len({found[0].tokens for found in expected}) >= 4
    for slots in (1, 5):
        engine = make_engine(version, manifest, slots=slots)
        answers = results(decode(engine, requests, stagger=1))
        for answer, wanted in zip(answers, expected, strict=True):
            for mine, other in zip(answer.hypotheses, wanted, strict=True):
                assert same_or_tie(mine.tokens, mine.token_log_probs, other.tokens, other.log_probs)
                if mine.tokens == other.tokens:
                    np.testing.assert_allclose(mine.token_log_probs, other.log_probs, atol=1e-4)


@pytest.mark.full
def test_its_graphs_compile_for_tensorrt(captioner: Captioner) -> None:
    found = compile_version(captioner.repository / "captions" / "1")
    assert next(each.axes for each in found["encoder"][0].inputs if each.name == "source") == ("B", "S", FEATURES)


@pytest.mark.full
def test_its_graphs_compile_in_half_precision(captioner: Captioner, tmp_path: Path) -> None:
    compile_lowered(captioner.repository / "captions" / "1", tmp_path / "lowered", "float16")


@asynccontextmanager
async def served(repository: Path) -> AsyncIterator[InferenceStub]:
    config = ServeConfig(repository=repository, grpc_port=0, metrics_port=0, threads=1)
    async with started(Server(config)) as server, connected(server) as stub:
        yield stub


def as_input(image: np.ndarray) -> pb.Input:
    return pb.Input(features=pb.Features(rows=image.shape[0], columns=image.shape[1], values=image.ravel().tolist()))


async def test_an_image_through_the_wire(captioner: Captioner) -> None:
    tokenizer = TextTokenizer.load(captioner.repository / "captions" / "1" / "tokenizer.json")
    grids = images((16, 4))
    options = pb.DecodingOptions(beam_size=1, max_length=12, return_alignment=True)
    async with served(captioner.repository) as stub:
        response = await stub.Translate(
            pb.TranslateRequest(inputs=[as_input(image) for image in grids], options=options)
        )
    for image, translation in zip(grids, response.translations, strict=True):
        assert translation.source_tokens == len(image)
        assert translation.hypotheses[0].text == tokenizer.decode(told(captioner.original, image, GREEDY)[0].tokens)
        for row in translation.hypotheses[0].alignment:  # where it looked
            assert len(row.weights) == len(image)
            assert sum(row.weights) == pytest.approx(1, abs=1e-5)


REFUSED = [
    (pb.Input(text="a picture"), f"has no features, but model captions reads nothing else: give 1 to {LONGEST} rows"),
    (pb.Input(), "has no features"),
    (pb.Input(features=pb.Features(rows=2, columns=5, values=[0] * 10)), "has 5 columns; this model reads 6"),
    (pb.Input(features=pb.Features(rows=0, columns=6)), f"has 0 rows; this model reads 1 to {LONGEST}"),
    (pb.Input(features=pb.Features(rows=61, columns=6, values=[0] * 366)), "has 61 rows; this model reads 1 to 60"),
    (pb.Input(features=pb.Features(rows=2, columns=6, values=[0] * 11)), "has 11 values; 2 rows of 6 columns are 12"),
    (
        pb.Input(features=pb.Features(rows=2, columns=6, values=[0] * 8 + [float("nan")] + [0] * 3)),
        "has nan in row 1, column 2; values must be finite",
    ),
    (
        pb.Input(features=pb.Features(rows=1, columns=6, values=[0] * 5 + [float("-inf")])),
        "has -inf in row 0, column 5; values must be finite",
    ),
]


async def test_features_that_are_refused(captioner: Captioner) -> None:
    async with served(captioner.repository) as stub:
        for item, sentence in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
                await stub.Translate(pb.TranslateRequest(inputs=[item]))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
