"""A model that classifies or embeds, on any device: one graph, run once per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from beamline.serving.backends.device import Graphs, check_slots
from beamline.serving.backends.padding import pad
from beamline.serving.contract.backend import Floats
from beamline.serving.contract.manifest import PooledManifest


class PooledGraphBackend:
    def __init__(self, manifest: PooledManifest, graphs: Graphs, rows: int) -> None:
        """`rows`: the largest batch."""
        check_slots(graphs, rows)
        self._graphs = graphs
        self._outputs = [each.name for each in graphs.spec("pooled").outputs]
        self._pad_id = manifest.pad_id

    def run(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
        ids, mask = pad(sources, self._pad_id)
        return self._graphs.fetch("pooled", {"source": ids, "source_mask": mask}, self._outputs)
