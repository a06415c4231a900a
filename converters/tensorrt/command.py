"""`beamline build`: TensorRT plans for a version that stands in a repository."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from beamline.converters.version.folder import add_version_arguments, version_folder

if TYPE_CHECKING:  # at run time only where it is needed: a command must load without it
    from beamline.converters.tensorrt.library import Library
    from beamline.converters.tensorrt.version import Wanted

HELP = "build TensorRT plans for a model of a repository"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument("--rebuild", action="store_true", help="also what is current")
    add_build_arguments(parser)


def add_build_arguments(parser: argparse._ActionsContainer) -> None:
    """Shared with `beamline convert --target tensorrt`."""
    parser.add_argument(
        "--compute-capability",
        metavar="80,86,...",
        help="GPUs to build for (default: those here, or all common ones)",
    )
    parser.add_argument("--buckets", metavar="64,256,...", help="cache lengths (default: few, up to the worst case)")
    parser.add_argument("--plan-slots", type=int, default=32, metavar="N", help="requests at once (%(default)s)")
    parser.add_argument(
        "--library",
        choices=("tensorrt", "tensorrt_rtx"),
        help="default: what a server here would run them with, else what is installed",
    )


def run(arguments: argparse.Namespace) -> int:
    folder = version_folder(arguments.repo, arguments.model)
    return build_folder(folder, arguments, rebuild=arguments.rebuild)


def what_to_build(arguments: argparse.Namespace, rebuild: bool = False) -> tuple[Library, Wanted]:
    """Raises a `ConversionError` where that can't be, before a conversion has taken its minutes."""
    from beamline.converters.tensorrt.build import check_capability
    from beamline.converters.tensorrt.library import find_library
    from beamline.converters.tensorrt.targets import checked_capabilities, library_of
    from beamline.converters.tensorrt.version import Wanted
    from beamline.serving.backends.selection import look
    from beamline.serving.errors import ConversionError

    machine = look()
    devices = machine.usable
    library = find_library(arguments.library or library_of(machine, arguments.compute_capability))
    capabilities = checked_capabilities(arguments.compute_capability, library, devices)
    for capability in capabilities:
        check_capability(library, capability)
    if arguments.plan_slots < 1:
        raise ConversionError(f"--plan-slots {arguments.plan_slots}: a plan holds at least one request")
    gpu = devices[0].name if devices else ""
    return library, Wanted(capabilities, _buckets(arguments.buckets), arguments.plan_slots, rebuild, gpu)


def build_folder(folder: Path, arguments: argparse.Namespace, rebuild: bool = False) -> int:
    from beamline.converters.tensorrt.version import Outcome, build_version, planned
    from beamline.serving.contract.manifest import read_any_manifest

    library, wanted = what_to_build(arguments, rebuild)

    def report(outcome: Outcome) -> None:
        card = outcome.card
        size, built = card.plan_bytes / 2**20, f"{card.build_seconds:.1f} s ({outcome.note})"
        print(f"  {card.title}: {size:,.1f} MiB, {'current' if outcome.note == 'current' else built}", flush=True)

    manifest = read_any_manifest(folder)
    print(f"{folder}: {library.name} {library.version}; about, with {wanted.slots} slots:")
    print("".join(f"  {line}\n" for line in planned(folder, manifest, wanted).lines()), end="", flush=True)
    cards = build_version(folder, manifest, library, wanted, report)
    said = [card.activation_bytes for card in cards if card.activation_bytes is not None]
    activations = f", activations {max(said) / 2**20:,.0f} MiB" if said else ""
    print(f"  {len(cards)} plans, {sum(card.plan_bytes for card in cards) / 2**20:,.1f} MiB{activations}")
    return 0


def _buckets(text: str | None) -> tuple[int, ...]:
    from beamline.serving.errors import ConversionError

    try:
        sizes = tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise ConversionError(f"--buckets {text!r}: cache lengths such as 64,256 are expected")
    return sizes
