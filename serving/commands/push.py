"""`beamline push`: a model repository as an image in a container registry."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path, PurePosixPath

from beamline.serving.commands.serve_options import DEFAULT_REPOSITORY
from beamline.serving.errors import ModelError
from beamline.serving.models.oci_image import Layer, push
from beamline.serving.models.oci_registry import Reference
from beamline.serving.models.repository import Repository, scan, verify
from beamline.serving.models.settings import SETTINGS_FILE

HELP = "put models into a container registry"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", help="oci://HOST/NAME:TAG; oci+http:// where the registry has no TLS")
    parser.add_argument(
        "--repo",
        type=Path,
        default=DEFAULT_REPOSITORY,
        metavar="DIR",
        help=f"a model repository, a model's folder or a version's ({DEFAULT_REPOSITORY})",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the image by its digest, which always means what was pushed, wherever the tag moves."""
    reference = Reference.parse(args.image)
    if ":" in reference.tag or reference.folder:
        raise ModelError(f"{args.image!r} can't be pushed to: give a tag, and neither a digest nor a folder")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    layers = layers_of(scan(args.repo))
    digest = push(reference, layers)
    print(f"{reference.scheme}://{reference.host}/{reference.name}@{digest}")
    return 0


def layers_of(repository: Repository) -> list[Layer]:
    """One for each version, and one for the models' settings. Only what is whole: raises `ModelError` with every
    reason why not."""
    reasons = [problem.reason for problem in repository.problems]
    layers = []
    settings: dict[PurePosixPath, Path] = {}
    for name, versions in sorted(repository.models.items()):
        if (file := repository.folders[name] / SETTINGS_FILE).is_file():
            settings[PurePosixPath(name, SETTINGS_FILE)] = file
        for version in versions:
            try:
                verify(version.folder, version.manifest)
            except ModelError as error:
                reasons.append(str(error))
            title = PurePosixPath(name, str(version.version))
            layers.append(Layer(str(title), {title / path: version.folder / path for path in files_of(version.folder)}))
    if not layers:
        reasons.append(f"{repository.root} has no model")
    if reasons:
        raise ModelError("; ".join(reasons))
    return [*layers, Layer(SETTINGS_FILE, settings)] if settings else layers


def files_of(folder: Path) -> list[PurePosixPath]:
    """Hidden ones are nobody's business."""
    paths = [PurePosixPath(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in paths if not any(part.startswith(".") for part in path.parts)]
