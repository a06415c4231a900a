"""ONNX Runtime on the CPU, for a graph that is run once per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from beamline.serving.backends.padding import pad
from beamline.serving.backends.session import open_session
from beamline.serving.contract.backend import Floats
from beamline.serving.contract.manifest import PooledManifest


class OnnxRuntimePooled:
    def __init__(self, folder: Path, manifest: PooledManifest, threads: int) -> None:
        self._session = open_session(folder / manifest.graph.file, threads)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._pad_id = manifest.pad_id

    def run(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
        ids, mask = pad(sources, self._pad_id)
        values = self._session.run(self._outputs, {"source": ids, "source_mask": mask})
        return dict(zip(self._outputs, values, strict=True))
