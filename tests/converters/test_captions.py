"""Image captioning: the encoder's input is a grid of feature vectors, of any number of positions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from converters.recognise import converter_for
from protos import beamline_pb2 as pb
from protos.beamline_pb2_grpc import InferenceStub
from serving.config import ServeConfig
from serving.engine.request import DecodingOptions
from serving.manifest import read_manifest
from serving.server import Server
from serving.tokenizer import TextTokenizer
from tests.serving.doubles import connected, started
from tests.support.captions import FEATURES, LONGEST, as_ours, show_attend_tell, write_captioner
from tests.support.checkpoints import EOS, START
from tests.support.compiled import compile_version
from tests.support.engines import decode, make_engine, results
from tests.support.plain_search import Found, plain_search
from tests.support.ties import same_or_tie

GREEDY = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=12)
BEAM = replace(GREEDY, beam_size=4, num_hypotheses=4)


def images(rows: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((count, FEATURES)).astype(np.float32) * 1.5 for count in rows]


def told(image: np.ndarray, options: DecodingOptions) -> list[Found]:
    """What the paper's model says, by a plain search."""
    model, features = show_attend_tell(), torch.from_numpy(image)

    def log_probs(sequences: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(features[None].expand(len(sequences), -1, -1), torch.ones(1), torch.tensor(sequences))
        return logits[:, -1].log_softmax(-1)  # type: ignore[no-any-return]

    return plain_search(log_probs, options, START, EOS)


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    converter_for(write_captioner(folder / "source")).convert("captions", folder / "repository")
    return folder / "repository"


@torch.no_grad()
def test_our_module_is_the_papers() -> None:
    theirs = show_attend_tell()
    ours = as_ours(theirs)
    grids = images((4, 9, 1))
    padded = torch.full((3, 9, FEATURES), 7.0)  # what stands behind an image's end does not matter
    mask = torch.arange(9)[None, :] < torch.tensor([4, 9, 1])[:, None]
    for row, image in enumerate(grids):
        padded[row, : len(image)] = torch.from_numpy(image)
    target = torch.tensor([[START, 5, 9], [START, 8, 8], [START, 30, 4]])
    found = ours(padded, mask, target)
    for row, image in enumerate(grids):
        expected = theirs(torch.from_numpy(image)[None], mask, target[row : row + 1])[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_captions_are_the_papers(captions: Path) -> None:
    """Grids of different sizes, greedy and beam search side by side."""
    version = captions / "captions" / "1"
    manifest = read_manifest(version)
    assert manifest.feature_width == FEATURES
    assert json.loads((version / "parity.json").read_text())["beam_exact_share"] == 1.0
    requests = [(image, options) for image in images((1, 49, 4, 16, 9, 33)) for options in (GREEDY, BEAM)]
    expected = [told(image, options) for image, options in requests]
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
def test_its_graphs_compile_for_tensorrt(captions: Path) -> None:
    found = compile_version(captions / "captions" / "1")
    assert next(each.axes for each in found["encoder"][0].inputs if each.name == "source") == ("B", "S", FEATURES)


@asynccontextmanager
async def served(repository: Path) -> AsyncIterator[InferenceStub]:
    config = ServeConfig(repository=repository, grpc_port=0, metrics_port=0, threads=1)
    async with started(Server(config)) as server, connected(server) as stub:
        yield stub


def as_input(image: np.ndarray) -> pb.Input:
    return pb.Input(features=pb.Features(rows=image.shape[0], columns=image.shape[1], values=image.ravel().tolist()))


@pytest.mark.full
async def test_an_image_through_the_wire(captions: Path) -> None:
    tokenizer = TextTokenizer.load(captions / "captions" / "1" / "tokenizer.json")
    grids = images((16, 4))
    options = pb.DecodingOptions(beam_size=1, max_length=12, return_alignment=True)
    async with served(captions) as stub:
        response = await stub.Translate(
            pb.TranslateRequest(inputs=[as_input(image) for image in grids], options=options)
        )
    for image, translation in zip(grids, response.translations, strict=True):
        assert translation.source_tokens == len(image)
        assert translation.hypotheses[0].text == tokenizer.decode(told(image, GREEDY)[0].tokens)
        for row in translation.hypotheses[0].alignment:  # where it looked
            assert len(row.weights) == len(image)
            assert sum(row.weights) == pytest.approx(1, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (
            pb.Input(text="a picture"),
            f"has no features, but model captions reads nothing else: give 1 to {LONGEST} rows",
        ),
        (pb.Input(), "has no features"),
        (pb.Input(features=pb.Features(rows=2, columns=5, values=[0] * 10)), "has 5 columns; this model reads 6"),
        (pb.Input(features=pb.Features(rows=0, columns=6)), f"has 0 rows; this model reads 1 to {LONGEST}"),
        (pb.Input(features=pb.Features(rows=61, columns=6, values=[0] * 366)), "has 61 rows; this model reads 1 to 60"),
        (
            pb.Input(features=pb.Features(rows=2, columns=6, values=[0] * 11)),
            "has 11 values; 2 rows of 6 columns are 12",
        ),
        (
            pb.Input(features=pb.Features(rows=2, columns=6, values=[0] * 8 + [float("nan")] + [0] * 3)),
            "has nan in row 1, column 2; values must be finite",
        ),
        (
            pb.Input(features=pb.Features(rows=1, columns=6, values=[0] * 5 + [float("-inf")])),
            "has -inf in row 0, column 5; values must be finite",
        ),
    ],
)
async def test_features_that_are_refused(captions: Path, item: pb.Input, sentence: str) -> None:
    async with served(captions) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
            await stub.Translate(pb.TranslateRequest(inputs=[item]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
