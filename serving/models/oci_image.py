"""A model repository as an image: what Kubernetes mounts as a volume, any registry keeps, and `--repo oci://` reads.

An image is a stack of tar files, and each one is known by its digest. Ours have one for each version, so that a new
version costs its own size and no more. Others' may be built in any way, and have other things in them: a file of an
upper layer hides a lower one, and a whiteout (`.wh.NAME`) removes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from beamline.serving.contract.files import open_regular
from beamline.serving.errors import ModelError
from beamline.serving.models.oci_registry import (
    Descriptor,
    ImageIndex,
    ImageManifest,
    Reference,
    Registry,
    digest_of,
)
from beamline.serving.models.stores import FILE_DEPTH, is_hidden, staging_folder

log = logging.getLogger(__name__)

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
TITLE = "org.opencontainers.image.title"
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"  # of a folder: whatever lower layers have in it
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class ImageStore:
    """The files of an image, kept unpacked by layer: a restart or a moved tag fetches only layers that are new."""

    def __init__(self, reference: Reference, folder: Path) -> None:
        self._registry = Registry(reference)
        self._folder = folder
        self._root = PurePosixPath(reference.folder)
        self._digest: str | None = None  # of the image that `_files` are of
        self._files: dict[PurePosixPath, Path] = {}

    def refresh(self) -> None:
        """All of an image or nothing: what can't be fetched or is not what its digest says raises `ModelError`."""
        content, digest = self._registry.manifest(self._registry.reference.tag)
        if digest == self._digest:
            return
        image = self._image(content)
        self._folder.mkdir(parents=True, exist_ok=True)
        layers = [self._unpacked(layer) for layer in image.layers]
        self._files = self._merged(layers)
        self._digest = digest
        for other in set(self._folder.iterdir()) - set(layers):
            shutil.rmtree(other, ignore_errors=True)

    def files(self) -> set[PurePosixPath]:
        return {path for path in self._files if not is_hidden(path)}

    def read(self, path: PurePosixPath) -> bytes:
        return self._place(path).read_bytes()

    def copy(self, path: PurePosixPath, target: Path) -> None:
        place = self._place(path)
        try:
            os.link(place, target)  # nobody writes to either
        except OSError:  # a file system that can't
            shutil.copyfile(place, target)

    def _place(self, path: PurePosixPath) -> Path:
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    def _image(self, content: bytes) -> ImageManifest:
        """Of an index, the image for this machine, or the only one."""
        name = self._registry.reference
        try:
            if "manifests" not in json.loads(content):
                return ImageManifest.model_validate_json(content)
            images = ImageIndex.model_validate_json(content).manifests
            wanted = ("linux", _ARCHITECTURES.get(platform.machine(), platform.machine()))
            ours = [
                each for each in images if each.platform and (each.platform.os, each.platform.architecture) == wanted
            ]
            if not ours and len(images) != 1:
                raise ModelError(f"{name} is no image for {'/'.join(wanted)}, and it has several others")
            chosen, _ = self._registry.manifest((ours or images)[0].digest)
            return ImageManifest.model_validate_json(chosen)
        except ValueError as error:
            raise ModelError(f"{name} is no image that can be read: {' '.join(str(error).split())}") from error

    def _unpacked(self, layer: Descriptor) -> Path:
        target = self._folder / layer.digest.partition(":")[2]
        if not target.is_dir():
            with staging_folder(self._folder) as staging:
                blob, files = staging / "blob", staging / "files"
                self._registry.download(layer, blob)
                files.mkdir()
                try:
                    self._unpack(blob, files)
                except (tarfile.TarError, EOFError, OSError) as error:
                    what = f"the layer {layer.digest} of {self._registry.reference} ({layer.media_type})"
                    raise ModelError(
                        f"{what} can't be unpacked: {error}; it must be a tar file, or one by gzip"
                    ) from error
                os.rename(files, target)
        return target

    def _unpack(self, blob: Path, target: Path) -> None:
        """Whatever may belong to a repository: plain files that are not too deep."""
        with tarfile.open(blob) as archive:
            for member in archive:
                path = PurePosixPath(member.name.lstrip("/"))
                if ".." in path.parts:
                    raise ModelError(f"the file name {member.name!r} leads out of the image {self._registry.reference}")
                near = path.is_relative_to(self._root) and len(path.relative_to(self._root).parts) <= FILE_DEPTH
                if not member.isreg() or not (near or path.name.startswith(_WHITEOUT)):
                    continue
                content = archive.extractfile(member)
                assert content is not None  # of a plain file
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                with content, (target / path).open("wb") as file:
                    shutil.copyfileobj(content, file)

    def _merged(self, layers: Iterable[Path]) -> dict[PurePosixPath, Path]:
        merged: dict[PurePosixPath, Path] = {}
        for layer in layers:
            found = {PurePosixPath(place.relative_to(layer)): place for place in layer.rglob("*") if place.is_file()}
            marks = [path for path in found if path.name.startswith(_WHITEOUT)]
            gone = [
                path.parent if path.name == _OPAQUE else path.with_name(path.name[len(_WHITEOUT) :]) for path in marks
            ]
            merged = {path: place for path, place in merged.items() if not any(map(path.is_relative_to, gone))}
            merged |= {path: place for path, place in found.items() if path not in marks}
        below = {path: place for path, place in merged.items() if path.is_relative_to(self._root)}
        return {path.relative_to(self._root): place for path, place in below.items()}


@dataclass(frozen=True, slots=True)
class Layer:
    """Files for an image, by their path in it."""

    title: str
    files: dict[PurePosixPath, Path]


def push(reference: Reference, layers: Sequence[Layer]) -> str:
    """Sends what the registry does not have yet, then moves the tag; the image's digest. The same files make the same
    image, whenever and wherever it is made."""
    registry = Registry(reference)
    descriptors = []
    for layer in layers:
        with _packed(layer) as (blob, content):
            descriptors.append(blob)
            if registry.has(blob):
                log.info("%s is there already", layer.title)
            else:
                registry.upload(blob, content)
                log.info("%s sent, %.1f MiB", layer.title, blob.size / (1 << 20))
    # A tar file that is not compressed is its own "diff". The files run nowhere; images must still name a machine.
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [each.digest for each in descriptors]},
        }
    ).encode()
    described = Descriptor(media_type=CONFIG, digest=digest_of(config), size=len(config))
    if not registry.has(described):
        with tempfile.TemporaryFile() as file:
            file.write(config)
            registry.upload(described, file)
    image = ImageManifest(config=described, layers=tuple(descriptors))
    manifest = image.model_dump_json(by_alias=True, exclude_none=True).encode()
    registry.publish(manifest, image.media_type)
    return digest_of(manifest)


@contextmanager
def _packed(layer: Layer) -> Iterator[tuple[Descriptor, IO[bytes]]]:
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            folders = {parent for path in layer.files for parent in path.parents if parent.parts}
            for path in sorted({*folders, *layer.files}):
                entry = tarfile.TarInfo(str(path))  # of no one, and of no time
                if path in folders:
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(entry)
                    continue
                with open_regular(layer.files[path]) as content:
                    entry.size, entry.mode = os.fstat(content.fileno()).st_size, 0o644
                    archive.addfile(entry, content)
        size = file.tell()
        file.seek(0)
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        yield Descriptor(media_type=LAYER, digest=digest, size=size, annotations={TITLE: layer.title}), file
