"""The recipe in small: text that every Python has, a tiny model, the real command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from beamline.converters.families import converter_for
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.models.repository import verify
from examples.translation import models
from examples.translation.data import END, START, Corpus, Tokens, load_vocabulary
from examples.translation.evaluate import main as evaluate
from examples.translation.evaluate import mean_nll, translate
from examples.translation.loss import projected_loss
from examples.translation.settings import Settings
from examples.translation.ship import main as ship
from examples.translation.train import main
from examples.translation.trainer import PAUSE, STATE

TINY: dict[str, Any] = {
    "source": "low",
    "target": "up",
    "model": "transformer",
    "architecture": {
        "d_model": 32,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "ffn": 64,
        "max_positions": 128,
    },
    "vocab_size": 600,
    "origin_weights": {"header": 0.2},
    "join": 0.05,
    "batch_tokens": 1024,
    "learning_rate": 5e-3,
    "warmup_steps": 10,
    "decay_after": 20,
    "average_decay": 0.9,
    "max_steps": 40,
    "log_every": 5,
    "validate_every": 20,
    "bleu_lines": 20,
    "also_validate": ["more"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 lines of Python's own help to train on, 100 to validate; the task is to upper-case them."""
    folder = tmp_path_factory.mktemp("text")
    text = dict.fromkeys(line.strip() for topic in topics.values() for line in topic.splitlines())
    lines = [line for line in text if line and line.isascii()][:1100]
    for split, part in (("train", lines[:1000]), ("valid", lines[1000:]), ("more", lines[1000:])):
        (folder / f"{split}.low").write_text("\n".join(part) + "\n")
        (folder / f"{split}.up").write_text("\n".join(part).upper() + "\n")
        names = ["header" if set(line) <= set("*=-") else "prose" for line in part]
        (folder / f"{split}.src").write_text("\n".join(names) + "\n")
    return folder


def command(folder: Path, data: Path, out: Path, **changes: Any) -> list[str]:
    config = folder / f"{out.name}.json"
    config.write_text(json.dumps(TINY | changes))
    return ["--config", str(config), "--data", str(data), "--out", str(out), "--threads", "1"]


def log_of(out: Path, key: str) -> dict[int, Any]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {entry["step"]: entry[key] for entry in entries if key in entry}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    main(command(folder, data, folder / "out"))
    return folder / "out"


def test_the_loss_falls(run: Path) -> None:
    trained, validated = log_of(run, "train_loss"), log_of(run, "valid_nll")
    assert list(trained) == list(range(5, 41, 5))
    assert list(validated) == [0, 20, 40]
    assert trained[40] < trained[5] - 0.5
    assert validated[40] < validated[20] < validated[0]
    assert set(log_of(run, "bleu")) == set(log_of(run, "chrf")) == {0, 20, 40}
    assert log_of(run, "tokens")[40] > 40 * 500
    bleu, chrf = log_of(run, "bleu"), log_of(run, "chrf")
    assert log_of(run, "more") == {step: {"bleu": bleu[step], "chrf": chrf[step]} for step in bleu}  # the same lines


def test_the_learning_rate_warms_up_falls_and_cools_down() -> None:
    changes = {"learning_rate": 1.0, "warmup_steps": 10, "decay_after": 20, "max_steps": 100}
    settings = Settings(**TINY | changes)
    assert [settings.rate(step) for step in (5, 10, 20, 80)] == [0.5, 1.0, 1.0, 0.5]
    cooled = Settings(**TINY | changes | {"decay_after": 0, "cooldown_steps": 20})
    assert [cooled.rate(step) for step in (80, 81, 91, 100, 101)] == [1.0, 1.0, 0.5, 0.05, 0.0]


def test_an_interrupted_run_ends_like_an_uninterrupted_one(run: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(command(tmp_path, data, out, max_steps=20))
    with pytest.raises(SystemExit, match="--resume"):
        main(command(tmp_path, data, out))
    before = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    # as if it had been killed after more steps than it saved
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(before | {"step": 25, "train_loss": 99.0}) + "\n")
    main([*command(tmp_path, data, out), "--resume"])
    assert log_of(out, "train_loss") == log_of(run, "train_loss")
    assert log_of(out, "valid_nll") == log_of(run, "valid_nll")
    assert log_of(out, "seconds")[40] > before["seconds"]


@pytest.mark.parametrize(("name", "tolerance"), [("checkpoint", 1e-4), ("checkpoint-fp16", 1e-2)])
def test_the_exported_checkpoint_is_what_was_validated(
    run: Path, data: Path, tmp_path: Path, name: str, tolerance: float
) -> None:
    model = models.load(run / name).eval()
    described = json.loads((run / name / "config.json").read_text())
    assert described["model_type"] == "beamline_transformer"
    assert (described["source_language"], described["target_language"]) == ("low", "up")
    assert described["decoding"] == {"max_length_factor": 2.0, "max_length_extra": 10}
    vocabulary = load_vocabulary(run / name / "spm.model")
    settings = Settings(**TINY)
    valid = Corpus.load(data, "valid", settings, vocabulary, tmp_path, model.config.max_positions)
    assert mean_nll(model, valid.in_order(1024)) == pytest.approx(log_of(run, "valid_nll")[40], abs=tolerance)
    for beam in (1, 2):
        assert len(translate(model, vocabulary, ["the import statement", ""], beam)) == 2


def test_a_checkpoint_is_evaluated_from_the_command_line(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--source", str(data / "valid.low"), "--reference", str(data / "valid.up")]
    evaluate([str(run / "checkpoint"), *files, "--lines", "3", "--beam", "2", "--output", str(tmp_path / "out")])
    assert capsys.readouterr().out.startswith("BLEU / chrF of 3 lines, beam 2: ")
    assert len((tmp_path / "out").read_text(encoding="utf-8").splitlines()) == 3


def test_training_goes_on_from_an_exported_checkpoint(run: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    main([*command(tmp_path, data, out, max_steps=1), "--init", str(run / "checkpoint")])
    assert log_of(out, "valid_nll")[0] == log_of(run, "valid_nll")[40]
    wider = TINY["architecture"] | {"ffn": 128}
    with pytest.raises(SystemExit, match="ffn 64 there"):
        main(
            [
                *command(tmp_path, data, tmp_path / "wide", architecture=wider),
                "--init",
                str(run / "checkpoint"),
            ]
        )


def test_a_recurrent_model_trains_and_converts_too(run: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    architecture = {
        "cell": "gru",
        "embedding_width": 24,
        "encoder_width": 16,
        "decoder_width": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "bidirectional": "all",
        "bridge_from": "top",
        "attention_width": 16,
        "attention_order": "previous",
        "readout_width": 24,
        "max_positions": 128,
    }
    changes = {"model": "recurrent", "architecture": architecture, "max_steps": 20, "bleu_lines": 3}
    main([*command(tmp_path, data, out, **changes), "--spm", str(run / "spm.model")])
    trained, validated = log_of(out, "train_loss"), log_of(out, "valid_nll")
    assert trained[20] < trained[5] - 0.3
    assert validated[20] < validated[0]
    trained_model = models.load(out / "checkpoint").eval()
    loaded = converter_for(out / "checkpoint").load()
    source, target = torch.tensor([[5, 6, 7, END]]), torch.tensor([[START, 8, 9]])
    mask = torch.ones_like(source, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(loaded.original(source, mask, target), trained_model(source, mask, target))


@pytest.mark.parametrize(("name", "limit"), [("en-de", 10e6), ("en-de-gru", 10e6)])
def test_the_example_settings_can_be_built(name: str, limit: float) -> None:
    settings = Settings.read(Path(models.__file__).parent / f"{name}.json")
    model = models.build(settings.model, settings.architecture, settings.vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) <= limit


def test_gnmt_is_a_model_by_its_name(tmp_path: Path, run: Path) -> None:
    model = models.build("gnmt", {"width": 8}, 50)
    assert (len(model.encoder), model.config.decoder_layers, model.config.attention_layer) == (8, 8, "bottom")  # type: ignore[union-attr]
    models.export(tmp_path, model, models.weights_of(model), run / "spm.model")
    assert models.load(tmp_path).config == model.config


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_becomes_a_shipped_model(run: Path, data: Path, tmp_path: Path) -> None:
    for side in ("low", "up"):
        lines = (data / f"valid.{side}").read_text().splitlines(keepends=True)
        for name in ("test", "valid", "more"):
            (tmp_path / f"{name}.{side}").write_text("".join(lines[:20]))
    model, config = tmp_path / "repo" / "tiny", tmp_path / "tiny.json"
    (model / "1").mkdir(parents=True)  # an older version
    parts = ("figures", "sentences", "visitors", "copies")
    marks = [f"<!-- {part} -->\n<!-- end of {part} -->\n" for part in parts]
    (model / "README.md").write_text("By hand.\n" + "".join(marks))
    config.write_text(json.dumps(TINY | {"description": "upper-cases"}))
    where = ["--repo", str(model.parent), "--config", str(config), "--checkpoints", str(tmp_path / "kept")]
    ship(["tiny", "--run", str(run), "--data", str(tmp_path), *where])
    assert [each.name for each in model.iterdir() if each.is_dir()] == ["2"]
    manifest = read_manifest(model / "2")
    verify(model / "2", manifest)
    assert (manifest.description, manifest.source_languages) == ("upper-cases", ("low",))
    assert manifest.defaults.max_length_factor == 2.0
    card = (model / "README.md").read_text(encoding="utf-8")
    assert card.startswith("By hand.\n")
    assert "as shipped" in card
    assert "| as shipped, 20 lines of more |" in card
    assert "| 20 | I'm fed up" in card
    assert "| not judged | 100 | 66 |" in card
    assert "of 100 strings come through" in card
    assert (model / "curve.svg").read_text().count("<circle") == 3
    assert models.load(tmp_path / "kept" / "tiny").config == models.load(run / "checkpoint").config


def wait_for(condition: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_pauses_and_saves_when_told_to_stop(data: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = command(tmp_path, data, out, max_steps=10**6, log_every=1, validate_every=10**6)
    out.mkdir()
    (out / PAUSE).touch()
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.translation.train", *given, "--spm", str(run / "spm.model")],
        cwd=root,
        env=os.environ | {"PYTHONPATH": root},
    )
    try:
        wait_for((out / STATE).exists)  # saved on entering the pause
        time.sleep(1)
        assert list(log_of(out, "step")) == [0]
        (out / PAUSE).unlink()
        wait_for(lambda: max(log_of(out, "step")) >= 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    saved = torch.load(out / STATE, weights_only=True)["progress"]
    assert saved["step"] == max(log_of(out, "step"))


def test_the_loss_and_its_gradients_are_pytorchs_own() -> None:
    torch.manual_seed(0)
    output = torch.nn.Linear(16, 50)
    hidden, labels = torch.randn(600, 16, requires_grad=True), torch.randint(50, (600,))
    tensors = (hidden, output.weight, output.bias)
    expected = F.cross_entropy(output(hidden), labels, label_smoothing=0.1, reduction="sum")
    wanted = torch.autograd.grad(expected / 7, tensors)
    sums = projected_loss(hidden, output, labels, 0.1)
    torch.testing.assert_close(sums.smoothed, expected)
    torch.testing.assert_close(sums.nll, F.cross_entropy(output(hidden), labels, reduction="sum"))
    torch.testing.assert_close(torch.autograd.grad(sums.smoothed / 7, tensors), wanted)


def corpus(lines: int, weights: np.ndarray) -> Corpus:
    """Line i is i % 30 + 1 times the token i + 10, on both sides."""
    lengths = np.arange(lines) % 30 + 1
    flat = np.repeat(np.arange(lines) + 10, lengths).astype(np.int32)
    tokens = Tokens(flat, np.cumsum([0, *lengths]))
    return Corpus(tokens, tokens, weights, max_length=64)


def test_every_line_is_drawn_as_often_as_its_origin_weighs() -> None:
    weights = np.array([0.15, 1.0, 2.5, 0.0] * 1000)
    drawn = np.bincount(corpus(4000, weights).samples((1, 0), join=0.1).order, minlength=4000).reshape(-1, 4)
    assert set(drawn[:, 0]) == {0, 1}
    assert drawn[:, 0].mean() == pytest.approx(0.15, abs=0.04)
    assert set(drawn[:, 1]) == {1}
    assert set(drawn[:, 2]) == {2, 3}
    assert set(drawn[:, 3]) == {0}


def test_batches_fit_and_epochs_differ() -> None:
    settings = Settings(**TINY | {"join": 0.0, "batch_tokens": 200})
    text = corpus(500, np.ones(500))
    first = list(text.epoch(0, settings))
    seen = sorted(row[0] for batch in first for row in batch.labels.tolist())
    assert seen == [i + 10 for i in range(500)]
    for batch in first:
        assert batch.labels.numel() <= 200
        assert batch.target[:, 0].tolist() == [START] * len(batch.target)
        assert batch.tokens == int(batch.source_mask.sum()) == int((batch.labels != 0).sum())
        assert ((batch.source == END).sum(1) == 1).all()
    again, skipped = list(text.epoch(0, settings)), list(text.epoch(0, settings, skip=5))
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first[5:], skipped, strict=True))
    second = list(text.epoch(1, settings))
    assert not all(torch.equal(a.labels, b.labels) for a, b in zip(first, second, strict=False))


def test_joined_lines_stay_aligned() -> None:
    settings = Settings(**TINY | {"join": 0.5})
    rows = [
        (source, label)
        for batch in corpus(300, np.ones(300)).epoch(0, settings)
        for source, label in zip(batch.source.tolist(), batch.labels.tolist(), strict=True)
    ]
    assert all(source == label for source, label in rows)
    assert any(len(set(source)) > 3 for source, _ in rows)
