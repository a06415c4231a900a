"""Train a translation model from parallel text: see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path

import torch

from examples.translation.data import load_vocabulary, train_vocabulary
from examples.translation.models import CONFIG, VOCABULARY, build, load, load_weights, weights_of
from examples.translation.settings import Settings
from examples.translation.trainer import STATE, Trainer


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.translation.train", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="settings, e.g. en-de.json")
    parser.add_argument("--data", type=Path, required=True, help="holds train.* and valid.*")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints, log and caches")
    parser.add_argument("--resume", action="store_true", help="go on from OUT, if a run was saved there")
    parser.add_argument("--init", type=Path, help="start from this checkpoint's weights and vocabulary")
    parser.add_argument("--spm", type=Path, help="use this vocabulary instead of training one")
    parser.add_argument("--threads", type=int, help="of PyTorch; as many as there are cores by default")
    parser.add_argument(
        "--bfloat16", action="store_true", help="multiply in bfloat16: faster on CPUs that can (avx512_bf16, amx_bf16)"
    )
    parser.add_argument("--max-minutes", type=float, help="stop after this time, saved and resumable")
    return parser.parse_args(given)


def prepare(options: argparse.Namespace) -> Trainer:
    settings = Settings.read(options.config)
    options.out.mkdir(parents=True, exist_ok=True)
    saved = (options.out / STATE).exists()
    if saved and not options.resume:
        raise ValueError(f"{options.out} already holds a run: give --resume to go on, or another --out")
    vocabulary_file = options.out / VOCABULARY
    if not vocabulary_file.exists():
        existing = options.init / VOCABULARY if options.init else options.spm
        if existing:
            shutil.copyfile(existing, vocabulary_file)
        else:
            train_vocabulary(settings, options.data, vocabulary_file)
    vocabulary = load_vocabulary(vocabulary_file)
    torch.manual_seed(settings.seed)
    model = build(settings.model, settings.architecture, vocabulary.get_piece_size())
    if options.init and not saved:
        start = load(options.init)
        if start.config != model.config:
            theirs, ours = start.config.to_json(), model.config.to_json()
            different = [f"{name} {theirs[name]} there" for name in ours if theirs[name] != ours[name]]
            raise ValueError(f"{options.init / CONFIG} differs from the settings: {', '.join(different)}")
        load_weights(model, weights_of(start))
    trainer = Trainer(settings, model, vocabulary, options.data, options.out)
    (options.out / "settings.json").write_text(json.dumps(settings.to_json(), indent=2) + "\n")
    if saved:
        trainer.resume()
    return trainer


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.bfloat16:
        torch.set_float32_matmul_precision("medium")
    try:
        trainer = prepare(options)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: trainer.stop())
    trainer.run(options.max_minutes)


if __name__ == "__main__":
    main()
