"""Exported graphs, run by ONNX Runtime as a server would: encoder or prompt first, then step after step, each fed with
what the last one returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from beamline.serving.contract.manifest import Manifest, StateKind

PREFILL_CHUNK = 8  # short, so that most prompts need several
Feeds = dict[str, NDArray[Any]]


Source = tuple[int, ...] | NDArray[np.float32]  # token ids, or, for an encoder that reads no text, features


@dataclass(frozen=True)
class Case:
    """What a request brings. An encoder-decoder's prompt is its start token; a language model has no source."""

    source: Source
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Beams:
    sequences: list[tuple[int, ...]]  # best first, prompt included
    scores: NDArray[np.float32]


class GraphRunner:
    def __init__(self, folder: Path, manifest: Manifest, optimise: bool = True) -> None:
        def session(name: str) -> ort.InferenceSession:
            options = ort.SessionOptions()
            if not optimise:  # or it might take a rounding for a detour
                options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 3  # it warns that caches are copied; here they are, and it does not matter
            return ort.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])

        graphs = manifest.graphs
        self.manifest = manifest
        self.encoder = session(graphs.encoder.file) if graphs.encoder else None
        self.prefill = session(graphs.prefill.file) if graphs.prefill else None
        self.step = session(graphs.step.file)
        self.score = session(graphs.score.file)
        self.watch: Callable[[str, Feeds, Feeds], None] | None = None  # sees a graph's inputs and outputs

    def token_log_probs(
        self, cases: Sequence[Case], targets: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        feeds: Feeds = {"target": targets, "labels": labels}
        if self.encoder is not None:
            feeds["source"], feeds["source_mask"] = self._padded([case.source for case in cases])
        return self._run("score", feeds)["token_log_probs"]

    def beams(self, cases: Sequence[Case], width: int, steps: int) -> list[Beams]:
        """What lives after so many steps from the prompts' ends; the prompts may have different lengths."""
        feeds = self._start(cases, width, steps)
        self._read_sources(cases, feeds)
        kept = [[case.prompt] * width for case in cases]
        found: dict[int, Beams] = {}
        while len(found) < len(cases):
            # Without a graph for prompts, they are the forced beginning of what is generated.
            places = feeds["positions"]
            rest = [case.prompt[place + 1 : place + 2] for case, place in zip(cases, places, strict=True)]
            outputs = self._step(feeds, rest)
            for row, case in enumerate(cases):
                if rest[row]:
                    continue
                parents, tokens = outputs["parents"][row], outputs["next_tokens"][row]
                kept[row] = [(*kept[row][parent], int(token)) for parent, token in zip(parents, tokens, strict=True)]
                if len(kept[row][0]) == len(case.prompt) + steps:
                    found[row] = Beams(kept[row], feeds["scores"][row].copy())
        return [found[row] for row in range(len(cases))]

    def best_words(
        self, cases: Sequence[Case], forced: Sequence[Sequence[int]], steps: int
    ) -> tuple[list[tuple[int, ...]], list[list[int]], list[list[float]]]:
        """Greedily, so many steps from the prompts' ends, along forced words where there are any: what was written;
        what each step thought best, be it an end or forced otherwise; and by how much it was ahead of the second best,
        in log-probability."""
        feeds = self._start(cases, 1, steps)
        self._read_sources(cases, feeds)
        written: list[list[int]] = [[] for _ in cases]
        best: list[list[int]] = [[] for _ in cases]
        ahead: list[list[float]] = [[] for _ in cases]
        while any(len(words) < steps for words in best):
            places = [int(place) for place in feeds["positions"]]
            rest = [
                (*case.prompt, *words)[place + 1 : place + 2]
                for case, words, place in zip(cases, forced, places, strict=True)
            ]
            outputs = self._step(feeds, rest)
            for row, case in enumerate(cases):
                if places[row] >= len(case.prompt) - 1 and len(best[row]) < steps:
                    best[row].append(int(outputs["candidate_tokens"][row, 0]))
                    written[row].append(int(outputs["next_tokens"][row, 0]))
                    first, second = outputs["candidate_scores"][row, :2].tolist()
                    ahead[row].append(first - second)
        return [tuple(words) for words in written], best, ahead

    def _start(self, cases: Sequence[Case], width: int, steps: int) -> Feeds:
        batch, longest = len(cases), max(len(case.prompt) for case in cases)
        entries = width * (longest + steps) + PREFILL_CHUNK
        scores = np.full((batch, width), -1e9, np.float32)
        scores[:, 0] = 0
        no_edit = np.zeros((batch, width, 0), np.float32)
        feeds: Feeds = {
            "tokens": np.zeros((batch, width), np.int64),
            "positions": np.zeros(batch, np.int64),
            "write_index": np.zeros(batch, np.int64),
            "scores": scores,
            "ancestry": np.zeros((batch, width, entries), np.bool_),
            "width": np.full(batch, width),
            "independent": np.full(batch, width == 1),
            "edit_index": no_edit.astype(np.int64),
            "edit_scale": no_edit,
            "edit_add": no_edit,
            "sample_rows": np.zeros(0, np.int64),
            "sampling": np.zeros((0, 5), np.float32),
            "report_rows": np.zeros(0, np.int64),
        }
        axes = {"B": batch, "K": width, "C": entries}
        encoded: Feeds = {}
        if self.encoder is not None:
            ids, mask = self._padded([case.source for case in cases])
            encoded = self._run("encoder", {"source": ids, "source_mask": mask})
            axes["S"] = ids.shape[1]
            feeds["source_mask"] = mask
        for tensor in self.manifest.state:
            if tensor.name in encoded:
                recurrent = tensor.kind is StateKind.RECURRENT
                value = encoded[tensor.name]
                feeds[tensor.name] = np.repeat(value[:, None], width, axis=1) if recurrent else value
            elif tensor.name not in feeds:
                sizes = [axes[axis] if isinstance(axis, str) else axis for axis in tensor.shape]
                feeds[tensor.name] = np.zeros(sizes, tensor.dtype)
        return feeds

    def _read_sources(self, cases: Sequence[Case], feeds: Feeds) -> None:
        """Up to where the first step begins: behind the prompts where there is a graph for them, else at their first
        words, and the others are forced."""
        if self.prefill is not None:
            self._read_prompts(cases, feeds)
        else:
            feeds["tokens"][:] = [[case.prompt[0]] for case in cases]

    def _step(self, feeds: Feeds, forced: Sequence[Sequence[int]]) -> Feeds:
        """One step, whose results are in the feeds for the next one; `forced` has one word for a row, or none."""
        carried = ["tokens", "positions", "write_index", "scores", "ancestry"]
        carried += [tensor.name for tensor in self.manifest.state if tensor.kind is not StateKind.MEMORY]
        feeds["forced"] = np.array([word[0] if word else -1 for word in forced])
        outputs = self._run("step", feeds)
        feeds |= {name: outputs[f"next_{name}"] for name in carried}
        return outputs

    def _read_prompts(self, cases: Sequence[Case], feeds: Feeds) -> None:
        """All but the last token of each, in chunks; rows that are through with it get padding, as in a server."""
        assert self.prefill is not None
        entries = feeds["ancestry"].shape[2]
        lengths = np.array([len(case.prompt) - 1 for case in cases])
        names = [tensor.name for tensor in self.manifest.state]
        for begin in range(0, lengths.max(), PREFILL_CHUNK):
            chunks = [case.prompt[begin : min(begin + PREFILL_CHUNK, len(case.prompt) - 1)] for case in cases]
            tokens, real = self._padded(chunks)
            written = np.minimum(begin, lengths)
            own = written[:, None] + np.arange(tokens.shape[1])  # [B, Q]
            places = np.arange(entries)
            visible = np.where(real[:, :, None], places <= own[:, :, None], places == own[:, :, None])
            outputs = self._run(
                "prefill",
                {
                    "tokens": tokens,
                    "positions": written,
                    "write_index": written,
                    "visible": visible,
                    **{name: feeds[name] for name in names},
                },
            )
            feeds |= {name: outputs[f"next_{name}"] for name in names}
        feeds["positions"], feeds["write_index"] = lengths, lengths.copy()
        feeds["ancestry"] = feeds["ancestry"] | (np.arange(entries) < lengths[:, None, None])
        feeds["tokens"][:] = [[case.prompt[-1]] for case in cases]

    def _run(self, graph: str, feeds: Feeds) -> Feeds:
        session: ort.InferenceSession = getattr(self, graph)
        names = [output.name for output in session.get_outputs()]
        wanted = {argument.name for argument in session.get_inputs()}
        values = session.run(names, {name: value for name, value in feeds.items() if name in wanted})
        outputs = dict(zip(names, values, strict=True))
        if self.watch is not None:
            self.watch(graph, feeds, outputs)
        return outputs

    def _padded(self, rows: Sequence[Sequence[int] | Source]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        longest = max(map(len, rows))
        arrays = [np.asarray(row) for row in rows]
        fill = self.manifest.vocabulary.pad_id if arrays[0].ndim == 1 else 0
        ends = [((0, longest - len(row)), *[(0, 0)] * (row.ndim - 1)) for row in arrays]
        ids = np.stack([np.pad(row, end, constant_values=fill) for row, end in zip(arrays, ends, strict=True)])
        ids = ids if ids.ndim == 3 else ids.astype(np.int64)  # a row of nothing is of floats
        return ids, np.array([[index < len(row) for index in range(longest)] for row in rows])
