"""The weights of a version in memory of our own, while graphs are opened.

A runtime that is given a path maps the file, and one plain `cp` over it, long after, ends the process: what was mapped
of a file that has been truncated can't be read. Here the file is read once for all graphs and engines of a version; the
runtime copies what it needs, most of it into a layout of its own, and then this copy goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.files import open_regular
from beamline.serving.contract.manifest import AnyManifest
from beamline.serving.errors import ModelError

if TYPE_CHECKING:  # a server of fakes has neither
    import onnx
    import onnxruntime as ort

# Smaller ones stay: a graph that is first used later needs them again, and by then the file may be another.
_KEPT_BYTES = 64 * 2**20


class Weights:
    """Of one version. For one thread at a time."""

    def __init__(self, folder: Path, manifest: AnyManifest) -> None:
        self._path = folder / manifest.weights.file
        self._sha256 = manifest.weights.sha256
        self._content: NDArray[np.uint8] | None = None
        self._users = 0

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Around opening several graphs: they are read once, where a graph wants them."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users and self._content is not None and self._content.nbytes > _KEPT_BYTES:
                self._content = None

    def hand_over(self, model: onnx.ModelProto, options: ort.SessionOptions) -> None:
        """To a session of this model, which is to be made within `in_memory`."""
        entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
        names = {entry.value for entry in entries if entry.key == "location"}
        if names - {self._path.name}:
            raise ModelError(f"its weights are in {', '.join(sorted(names))}, not in {self._path.name} alone")
        if names:
            content = self.content()
            options.add_external_initializers_from_files_in_memory([self._path.name], [content], [content.nbytes])
            # Else what was copied, and is not needed any more when it has its own layout, stays with the runtime.
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")

    def content(self) -> NDArray[np.uint8]:
        """Of the whole file, within `in_memory`."""
        if self._content is None:
            content = _read(self._path)
            if hashlib.sha256(content.data).hexdigest() != self._sha256:
                raise ModelError(f"{self._path} is corrupt: its sha256 is not the manifest's")
            self._content = content
        return self._content


def _read(path: Path) -> NDArray[np.uint8]:
    try:
        with open_regular(path) as file:
            return np.fromfile(file, np.uint8)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
