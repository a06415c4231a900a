"""Recurrent language models: layers in, steps out, and the engine feeds them prompts token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from beamline.converters.base import Loaded
from beamline.converters.modules.recurrent_language import (
    RecurrentLanguageConfig,
    RecurrentLanguageModel,
    RecurrentLanguageSteps,
)
from beamline.converters.modules.tree import Tree
from beamline.converters.recognise import converter_for
from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import ServeConfig
from beamline.serving.contract.manifest import StateKind, read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.server import Server
from tests.converters.test_unsupported import edit, reasons_of
from tests.serving.doubles import connected, started
from tests.support.compiled import compile_version
from tests.support.engines import decode, make_engine, results
from tests.support.language_models import BOS, EOS, VOCABULARY, tokenizer_json
from tests.support.pairwise import Case, covering
from tests.support.plain_search import plain_search
from tests.support.recurrent import CELLS
from tests.support.recurrent_plain import plain_language_logits
from tests.support.ties import same_or_tie

TORCH_CELLS: dict[str, Callable[..., nn.Module]] = {
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}
WIDTH = 24
DEPTHS = (1, 2, 4)
RESIDUALS = (None, 1, 2)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"embedding_width": WIDTH, "tie_output": True},
    "no-bias": {"output_bias": False},
}
SHAPES = covering(list(CELLS), DEPTHS, RESIDUALS, list(HEADS))
assert_same = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def config_of(cell: str, **options: Any) -> RecurrentLanguageConfig:
    sizes = {"vocab_size": VOCABULARY, "embedding_width": 16, "width": WIDTH, "layers": 2, "max_positions": 256}
    return RecurrentLanguageConfig(**{**sizes, "eos_id": EOS, "start_id": BOS, **CELLS[cell], **options})


def shape_config(shape: Case) -> RecurrentLanguageConfig:
    cell, depth, residual, head = shape
    return config_of(cell, layers=depth, residual_from=residual, **HEADS[head])


@torch.no_grad()
def enliven(model: nn.Module, cell: str) -> None:
    """Its texts vary."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Without gates, wider ones make chaos: rounding would grow with every step.
            bearable = 0.2 if cell.startswith("rnn") and re.search(r"weight_(ih|hh)", name) else 0.6
            parameter.normal_(std=bearable, generator=generator)


def lively(config: RecurrentLanguageConfig) -> RecurrentLanguageModel:
    torch.manual_seed(0)
    model = RecurrentLanguageModel(config).eval()
    enliven(model, config.cell)
    return model


def write(
    folder: Path, config: RecurrentLanguageConfig, weights: Mapping[str, Tensor], names: dict[str, str] | None = None
) -> Path:
    names = names or {}
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: getattr(config, name) for name in RecurrentLanguageConfig.field_names()}
    (folder / "config.json").write_text(json.dumps({"family": "recurrent_language", **content, **names}))
    tensors = {}
    for name, tensor in weights.items():
        part, _, last = re.sub(r"^layers\.(\d+)\.cells\.0\.(\w+)$", r"rnn.\2_l\1", name).partition(".")
        if not (config.tie_output and name == "output.weight"):
            tensors[f"{names.get(part, part)}.{last}"] = tensor.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(tokenizer_json())
    return folder


def write_lively(folder: Path, config: RecurrentLanguageConfig, names: dict[str, str] | None = None) -> Path:
    return write(folder, config, dict(lively(config).named_parameters()), names)


def stepped(loaded: Loaded, tokens: Tensor) -> Tensor:
    """Logits [B, T, V], token by token."""
    steps = loaded.model
    assert isinstance(steps, RecurrentLanguageSteps)
    batch = len(tokens)
    states = tuple(torch.zeros(batch, 1, WIDTH) for _ in steps.state_tensors())
    tree = Tree(torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, 1, 1, 4, dtype=torch.bool))
    rows = []
    for place in range(tokens.shape[1]):
        logits, states = steps.step(tokens[:, place : place + 1], torch.full((batch,), place), tree, (), states)
        rows.append(logits)
    return torch.cat(rows, dim=1)


class TorchLanguageModel(nn.Module):
    """As its users write one."""

    def __init__(self, cell: str, layers: int, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.rnn = TORCH_CELLS[cell](16, WIDTH, layers, batch_first=True, bias=bias)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        enliven(self, cell)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.rnn(self.embedding(tokens))[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("cell", TORCH_CELLS)
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (3, False)])
@torch.no_grad()
def test_torchs_layers_are_loaded(tmp_path: Path, cell: str, layers: int, bias: bool) -> None:
    theirs = TorchLanguageModel(cell, layers, bias)
    loaded = converter_for(write(tmp_path, config_of(cell, layers=layers), theirs.state_dict())).load()
    tokens = torch.randint(3, VOCABULARY, (3, 20))
    assert_same(loaded.original(tokens), theirs(tokens))
    assert_same(stepped(loaded, tokens), theirs(tokens))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_every_shape_is_what_plain_cells_compute(tmp_path: Path, shape: Case) -> None:
    config = shape_config(shape)
    loaded = converter_for(write_lively(tmp_path, config)).load()
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    weights = dict(lively(config).named_parameters())
    expected = torch.stack([plain_language_logits(config, weights, row) for row in tokens.tolist()])
    assert_same(loaded.original(tokens), expected)
    assert_same(stepped(loaded, tokens), expected)


@torch.no_grad()
def test_other_names_and_tied_weights(tmp_path: Path) -> None:
    config = config_of("coupled-peepholes", **HEADS["tied"])
    folder = write_lively(tmp_path, config, {"embedding": "encoder", "rnn": "body.layers", "output": "head"})
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    found = converter_for(folder).load().original(tokens)
    torch.testing.assert_close(found, lively(config)(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("cell", ["rnn_tanh", "gru", "lstm", "coupled-peepholes"])
@torch.no_grad()
def test_sizes_are_read_off_the_weights(tmp_path: Path, cell: str) -> None:
    config = config_of(cell, layers=3, **HEADS["tied"], residual_from=2)
    folder = write_lively(tmp_path, config, {"embedding": "encoder", "output": "decoder"})
    measured = ("vocab_size", "embedding_width", "width", "layers", "cell", "tie_output", "output_bias")
    edit(folder / "config.json", **dict.fromkeys(measured))
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    found = converter_for(folder).load().original(tokens)
    torch.testing.assert_close(found, lively(config)(tokens), rtol=0, atol=0)


def test_names_that_the_weights_lack(tmp_path: Path) -> None:
    folder = write_lively(tmp_path, config_of("lstm"))
    edit(folder / "config.json", rnn="body", embedding="words")
    assert reasons_of(folder) == [
        "config.json: embedding is 'words', which the weights don't have",
        "config.json: rnn is 'body', which the weights don't have",
    ]


def test_every_reason_at_once(tmp_path: Path) -> None:
    folder = write_lively(tmp_path, config_of("lstm"))
    edit(folder / "config.json", cell="qrnn", eos_id=9999, colour="red", tie_output=True)
    assert [reason.split(": ")[1].split()[0] for reason in reasons_of(folder)] == [
        "'colour'",
        "cell",
        "tie_output",
        "eos_id",
    ]
    folder = write_lively(tmp_path / "gates", config_of("gru"))
    edit(folder / "config.json", peepholes=True, coupled_gates=True, residual_from=0)
    assert [reason.split(": ")[1].split()[0] for reason in reasons_of(folder)] == [
        "peepholes",
        "coupled_gates",
        "residual_from",
    ]
    folder = write_lively(tmp_path / "weights", config_of("lstm"), {"rnn": "body"})
    edit(folder / "config.json", layers=3, coupled_gates=True)
    reasons = reasons_of(folder)
    assert "body.weight_ih_l2 is missing" in reasons
    assert "body.weight_ih_l0 has shape [96, 16], but its configuration says [72, 16]" in reasons


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_recurrent_language_model_is_converted_and_served(tmp_path: Path, shape: Case) -> None:
    """Greedy and beam search in the engine, prompts of all lengths joining by and by, against PyTorch."""
    config = shape_config(shape)
    model = lively(config)
    _, certificate = converter_for(write_lively(tmp_path / "source", config)).convert("rnn", tmp_path / "repository")
    assert certificate.beam_exact_share == 1.0
    folder = tmp_path / "repository" / "rnn" / "1"
    manifest = read_manifest(folder)
    assert manifest.task == "generate"
    assert manifest.graphs.prefill is None
    assert {tensor.kind for tensor in manifest.state} == {StateKind.RECURRENT}
    assert set(compile_version(folder)) == {"step", "score"}  # for TensorRT
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 2, 5, 13, 30)]
    for beams in (1, 4):
        options = DecodingOptions(beam_size=beams, num_hypotheses=beams, max_length=20)
        engine = make_engine(folder, manifest, slots=3)
        answers = results(decode(engine, [(prompt, options) for prompt in prompts], stagger=2))
        for prompt, answer in zip(prompts, answers, strict=True):

            @torch.no_grad()
            def log_probs(sequences: list[list[int]], before: list[int] = prompt[:-1]) -> torch.Tensor:
                logits: torch.Tensor = model(torch.tensor([[*before, *each] for each in sequences]))
                return logits[:, -1].log_softmax(-1)

            expected = plain_search(log_probs, options, prompt[-1], EOS)
            for mine, other in zip(answer.hypotheses, expected, strict=True):
                assert same_or_tie(mine.tokens, mine.token_log_probs, other.tokens, other.log_probs)
                assert mine.score == pytest.approx(other.score, abs=1e-3)


SERVED = config_of("coupled-peepholes", layers=3, residual_from=1)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    converter_for(write_lively(folder / "source", SERVED)).convert("rnn", folder / "repository")
    return folder / "repository"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_its_graphs_compile_for_tensorrt(repository: Path) -> None:
    found = compile_version(repository / "rnn" / "1")
    assert "RECURRENCE" in found["score"][0].layers


@pytest.mark.full
async def test_it_generates_and_scores_through_the_wire(repository: Path) -> None:
    model = lively(SERVED)
    prompt = torch.randint(3, VOCABULARY, (7,), generator=torch.Generator().manual_seed(5)).tolist()
    ids = pb.TokenIds(ids=prompt)
    options = pb.GenerationOptions(max_tokens=12, temperature=0, ignore_eos=True, return_tokens=True)
    config = ServeConfig(repository=repository, grpc_port=0, metrics_port=0, threads=1)
    async with started(Server(config)) as server, connected(server) as stub:
        request = pb.GenerateRequest(token_ids=ids, options=options)
        written = [token.id async for reply in stub.Generate(request) for token in reply.tokens]
        (scored,) = (await stub.Score(pb.ScoreRequest(texts=[pb.Input(token_ids=ids)]))).scores
    text = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            logits = model(torch.tensor([text]))[0, -1]
            logits[EOS] = -torch.inf
            text.append(int(logits.argmax()))
        log_probs = model(torch.tensor([prompt]))[0].log_softmax(-1)
    assert written == text[len(prompt) :]
    wanted = [float(log_probs[place, token]) for place, token in enumerate(prompt[1:])]
    found = [token.log_prob for token in scored.tokens]
    assert found[-len(wanted) :] == pytest.approx(wanted, abs=1e-4)
