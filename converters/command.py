"""`beamline convert`: a checkpoint becomes a version in a model repository."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from beamline.converters.checkpoints.text_lines import read_lines
from beamline.converters.tensorrt.command import add_build_arguments, build_folder, what_to_build
from beamline.serving.contract.manifest import PRECISIONS
from beamline.serving.errors import ConversionError

T = TypeVar("T")

HELP = "convert a PyTorch checkpoint into a model repository"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder with the checkpoint, a GGUF file, or file.py:build"
    )
    parser.add_argument("--name", required=True, help="the model's name in the repository")
    parser.add_argument("--repo", type=Path, default=Path("model_repo"), help="model repository (default: model_repo)")
    parser.add_argument("--version", type=int, help="version number (default: the next one)")
    parser.add_argument("--config", type=Path, help="file that names the checkpoint's parts, where it is not ours")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="int8: a quarter of the size, twice as fast on a CPU; int4: smaller still, for few requests at once; "
        "float16, bfloat16: for GPUs (default: float32)",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="with int8: a line of typical text each, by which activations get fixed scales; a tenth faster",
    )
    parser.add_argument(
        "--grid",
        choices=("whole", "quick"),
        default="whole",
        help="how much is compared with the original: quick is a tenth of it, for a large model or a first try; "
        "parity.json says how much it was (default: whole)",
    )
    parser.add_argument("--target", choices=("onnx", "tensorrt"), default="onnx", help="tensorrt: build plans, too")
    add_build_arguments(parser.add_argument_group("with --target tensorrt"))
    own = parser.add_argument_group(
        "one's own module", "file.py:build, a function that returns it; see docs/own-model.md"
    )
    own.add_argument("--weights", type=Path, metavar="W", help="its weights: safetensors, npz, or a state dict")
    own.add_argument("--tokenizer", type=Path, metavar="T", help="tokenizer.json, or a sentencepiece model")
    own.add_argument("--target-tokenizer", type=Path, metavar="T", help="where it differs from the source's")


def run(arguments: argparse.Namespace) -> int:
    typical = [] if arguments.calibrate is None else _typical(arguments.calibrate)
    if arguments.target == "tensorrt":
        what_to_build(arguments)  # refused now, not after the conversion
    try:
        folder = _convert(arguments, typical)
    except KeyboardInterrupt:
        print("beamline: interrupted: nothing was written", file=sys.stderr)
        raise
    return build_folder(folder, arguments) if arguments.target == "tensorrt" else 0


def _convert(arguments: argparse.Namespace, typical: list[str]) -> Path:
    """The version's folder."""
    from tqdm import tqdm

    from beamline.converters.checkpoints.source import OwnFiles
    from beamline.converters.conversion import STEPS  # torch takes seconds to import: only once it is really needed
    from beamline.converters.families import any_converter_for

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that nothing half-made is left
    visible = sys.stderr.isatty()
    with tqdm(total=len(STEPS), unit="step", file=sys.stderr, disable=not visible, leave=False) as bar:

        def advance(step: str) -> None:
            bar.update(step != STEPS[0])
            bar.set_description(step)
            if not visible:  # a log shows that something happens, too
                print(f"{step} ...", file=sys.stderr, flush=True)

        def each(what: str, items: Sequence[T]) -> Iterable[T]:
            if not visible:
                print(f"verify: {what} ...", file=sys.stderr, flush=True)
            return tqdm(items, what, unit="", file=sys.stderr, disable=not visible, leave=False, position=1)

        own = OwnFiles(arguments.weights, arguments.tokenizer, arguments.target_tokenizer)
        converter = any_converter_for(arguments.source, arguments.config, own)
        manifest, certificate = converter.convert(
            arguments.name,
            arguments.repo,
            arguments.version,
            advance=advance,
            precision=arguments.precision,
            typical=typical,
            each=each,
            grid=arguments.grid,
        )
    folder: Path = arguments.repo / manifest.name / str(manifest.version)
    size = manifest.weights.bytes / 2**20
    print(f"{folder}: {manifest.family}, {size:,.1f} MiB of weights")
    print(certificate.table())
    return folder


def _typical(path: Path) -> list[str]:
    lines = read_lines(path)
    if not any(map(str.strip, lines)):
        raise ConversionError(f"--calibrate {path} has no text: it needs a line of typical input each")
    return lines
