"""Recurrent language models: `torch.nn` layers in, steps out, and the engine feeds them prompts token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from converters.families.recurrent_language import RecurrentLanguageConverter
from converters.modules.recurrent_language import (
    RecurrentLanguageConfig,
    RecurrentLanguageModel,
    RecurrentLanguageSteps,
)
from converters.recognise import converter_for
from serving.engine.request import DecodingOptions
from serving.manifest import StateKind, read_manifest
from tests.converters.test_unsupported import edit, reasons_of
from tests.support.compiled import compile_version
from tests.support.engines import decode, make_engine, results
from tests.support.language_models import BOS, EOS, VOCABULARY, tokenizer_json
from tests.support.plain_search import plain_search
from tests.support.ties import same_or_tie

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")


def lively(cell: str, **options: Any) -> RecurrentLanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "embedding_width": 16, "width": 24, "layers": 2, "max_positions": 256}
    config = RecurrentLanguageConfig(**{**sizes, "cell": cell, "eos_id": EOS, "start_id": BOS, **options})
    model = RecurrentLanguageModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Without gates, wider ones make chaos: rounding would grow with every step.
                parameter.normal_(std=0.2 if cell.startswith("rnn") and name.startswith("rnn") else 0.6)
    return model


def write(folder: Path, model: RecurrentLanguageModel, names: dict[str, str] | None = None) -> Path:
    names = names or {}
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: getattr(model.config, name) for name in RecurrentLanguageConfig.field_names()}
    (folder / "config.json").write_text(json.dumps({"family": "recurrent_language", **content, **names}))
    tensors = {}
    for name, tensor in model.state_dict().items():
        part, _, last = name.partition(".")
        if not (model.config.tie_output and name == "output.weight"):
            tensors[f"{names.get(part, part)}.{last}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(tokenizer_json())
    return folder


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_steps_are_torchs_layers(tmp_path: Path, cell: str, layers: int) -> None:
    model = lively(cell, layers=layers)
    loaded = converter_for(write(tmp_path, model)).load()
    tokens = torch.randint(3, VOCABULARY, (3, 20))
    expected = model(tokens)
    assert isinstance(loaded.model, RecurrentLanguageSteps)
    torch.testing.assert_close(loaded.original(tokens), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded.model.score(tokens), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_other_names_and_tied_weights(tmp_path: Path) -> None:
    model = lively("gru", embedding_width=24, tie_output=True)
    folder = write(tmp_path, model, {"embedding": "encoder", "rnn": "body.layers", "output": "head"})
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    torch.testing.assert_close(converter_for(folder).load().original(tokens), model(tokens), rtol=0, atol=0)


def test_every_reason_at_once(tmp_path: Path) -> None:
    folder = write(tmp_path, lively("lstm"))
    edit(folder / "config.json", cell="qrnn", eos_id=9999, colour="red", tie_output=True)
    assert [reason.split(": ")[1].split()[0] for reason in reasons_of(folder)] == [
        "'colour'",
        "cell",
        "tie_output",
        "eos_id",
    ]
    folder = write(tmp_path / "other", lively("lstm"))
    edit(folder / "config.json", layers=3)
    assert "rnn.weight_ih_l2 is missing" in reasons_of(folder)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS)
def test_a_recurrent_language_model_is_converted_and_served(tmp_path: Path, cell: str) -> None:
    """Greedy and beam search in the engine, prompts of all lengths joining by and by, against PyTorch."""
    model = lively(cell)
    RecurrentLanguageConverter(write(tmp_path / "source", model), tmp_path / "source" / "config.json").convert(
        "rnn", tmp_path / "repository"
    )
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
