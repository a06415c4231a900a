"""`beamline doctor`: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from beamline.serving.backends.selection import NEEDED_CAPABILITY, Choice, Machine, choose, kinds_of_gpus, look
from beamline.serving.contract.manifest import AnyManifest, read_any_manifest
from beamline.serving.contract.tensorrt_plans import PlanCard, foreign, how_to_build, read_cards, stale, usable_plans
from beamline.serving.errors import BeamlineError, ModelError

HELP = "say what this machine can run, and what to install for the rest"

_ADVICE = {
    "onnxruntime": "pip install '.[cpu]' to serve on the CPU",
    "onnxruntime-gpu": "pip install '.[gpu]' (instead of '.[cpu]') to serve on a GPU with ONNX Runtime",
    "tensorrt": "pip install '.[tensorrt]' to build and run plans on this GPU",
    "tensorrt-rtx": "pip install '.[tensorrt-rtx]' to build plans anywhere, and to run them on consumer GPUs",
    "cuda-bindings": "comes with '.[gpu]', '.[tensorrt]' and '.[tensorrt-rtx]'; without it no GPU is found",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repo", type=Path, metavar="DIR", help="also say which plans its models have")


def run(args: argparse.Namespace) -> int:
    print("\n".join(report(look(), args.repo)))
    return 0


def report(machine: Machine, repository: Path | None = None) -> list[str]:
    lines = [f"machine     {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"]
    lines.append(f"driver      {f'CUDA {machine.probe.driver}' if machine.probe.driver else 'none'}")
    for device in machine.probe.devices:
        size = f"{device.memory_bytes / 2**30:.1f} GiB"
        if device not in machine.usable:
            size += f": too old, capability {NEEDED_CAPABILITY} or higher is needed"
        lines.append(f"GPU {device.number}       {device.name}, compute capability {device.capability}, {size}")
    if not machine.probe.devices:
        lines.append(f"GPU         none: {machine.probe.reason}")
    for package, version in machine.packages.items():
        lines.append(f"{package:<16}{version or f'not installed: {_advice(package, machine)}'}")
    lines += [f"{kind:<12}{_verdict(kind, machine)}" for kind in ("cpu", "cuda", "tensorrt")]
    lines.append(f"auto        {_chosen(machine)}")
    return lines + (_plans(repository, machine) if repository is not None else [])


def _advice(package: str, machine: Machine) -> str:
    if package == "onnxruntime" and machine.has("onnxruntime-gpu"):
        # Beside it, it would overwrite its files, and take CUDA away.
        return "not needed, onnxruntime-gpu serves on the CPU, too"
    return _ADVICE[package]


def _verdict(kind: str, machine: Machine) -> str:
    if kind == "cpu" and not (machine.has("onnxruntime") or machine.has("onnxruntime-gpu")):
        return "no: neither onnxruntime nor onnxruntime-gpu is installed"
    try:
        choose(kind, machine)
    except BeamlineError as error:
        return f"no: {str(error).partition(': ')[2].removesuffix(' (`beamline doctor` says more)')}"
    return "yes"


def _chosen(machine: Machine) -> str:
    choice: Choice = choose("auto", machine)
    return f"{choice.kind}: {choice.reason}"


def _to_do(folder: Path, cards: Sequence[PlanCard], machine: Machine) -> str:
    name = f"{folder.parent.name}/{folder.name}"
    if not cards:
        return f"; beamline build {name}"
    manifest = read_any_manifest(folder)
    count = sum(stale(card, manifest) is not None for card in cards)
    if count:
        return f"; {count} of {len(cards)} plans are stale: beamline build {name}"
    return "".join(f"; {each}" for each in _refused(name, folder, manifest, cards, machine))


def _refused(
    name: str, folder: Path, manifest: AnyManifest, cards: Sequence[PlanCard], machine: Machine
) -> Iterator[str]:
    """Why a server on this machine would not run them, for each kind of GPU; nothing where none could be run."""
    library, version = machine.tensorrt, machine.tensorrt_version
    if library is None or not machine.probe.devices:
        return
    for device in kinds_of_gpus(choose("tensorrt", machine), manifest):
        try:
            usable_plans(folder, manifest, library, version, device.capability)
        except ModelError:
            reasons = {foreign(card, library, version, device.capability): None for card in cards}
            why = ", and ".join(filter(None, reasons)) or "some of its graphs have none"
            advice = how_to_build(name, library, device.capability, device.alone)
            yield f"not for GPU {device.number}: {why}: {advice}"


def _plans(repository: Path, machine: Machine) -> list[str]:
    lines = []
    for folder in sorted(path.parent for path in repository.glob("*/*/manifest.json")):
        name = f"{folder.parent.name}/{folder.name}"
        try:
            cards = read_cards(folder)
            found = sorted({f"{card.module} for {', '.join(card.capabilities)}" for card in cards})
            lines.append(f"{name}: {', '.join(found) or 'no plans'}{_to_do(folder, cards, machine)}")
        except ModelError as error:
            lines.append(f"{name}: {error}")
    return lines
