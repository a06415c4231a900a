"""How large the live tree is on real text: the cache entries that some living beam still needs, measured in paths.

Beams share most of their past, so it should stay near one path; its worst case is as many paths as there are beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from beamline.serving.contract.manifest import read_manifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.request import Request
from beamline.serving.models.engines import EngineSettings, load_engine
from beamline.serving.text.tokenizer import TextTokenizer
from tests.benchmarks.table import print_table
from tests.support.engines import step

_SLOTS = 16
_BEAMS = (4, 8)


def print_live_tree(folder: Path, lines: Sequence[str], threads: int) -> None:
    manifest = read_manifest(folder)
    tokenizer = TextTokenizer.load(folder / manifest.tokenizers.source.file)
    limit = manifest.limits.max_source_length
    sources = [ids for ids in map(tokenizer.encode, lines) if 0 < len(ids) <= limit]
    print(f"\nThe live tree of {manifest.name} version {manifest.version} on {len(sources)} real sentences,")
    print("in paths (entries that a living beam needs / length of one path), sampled at every step of every request:\n")
    header = ("beams", "mean", "p95", "max", "used", "steps", "tokens", "compactions", "relayouts", "moves")
    rows = [_row(folder, sources, beams, threads) for beams in _BEAMS if beams <= manifest.limits.max_beam_size]
    print_table([header, *rows])
    print("\nused: the same for all entries that the cache holds, dead branches included, on average.")


def _row(folder: Path, sources: Sequence[Sequence[int]], beams: int, threads: int) -> tuple[str, ...]:
    manifest = read_manifest(folder)
    steps: list[StepStats] = []
    results: list[Output] = []
    settings = EngineSettings(threads=threads, slots=_SLOTS, max_queue=len(sources))
    engine = load_engine(folder, manifest, settings, steps.append)
    defaults = manifest.defaults
    options = DecodingOptions(
        beam_size=beams,
        num_hypotheses=1,
        max_length=defaults.max_length,
        length_penalty=defaults.length_penalty,
        early_stopping=defaults.early_stopping,
        bad_words=defaults.bad_words,
        suppress_tokens=defaults.suppress_tokens,
        forced_eos_id=defaults.forced_eos_id,
    )
    for source in sources:
        engine.submit(Request(tuple(source), options, results.append))
    live: list[float] = []
    used: list[float] = []
    while engine.busy:
        step(engine)
        for request in engine._scheduler.active:
            path = request.search.depth
            if path:
                live.append(len(request.search.live_entries()) / path)
                used.append(request.search.used_entries / path)
    answered = [result for result in results if isinstance(result, Result)]
    assert len(answered) == len(sources), "some sentences failed"
    return (
        str(beams),
        f"{np.mean(live):.2f}",
        f"{np.percentile(live, 95):.2f}",
        f"{max(live):.2f}",
        f"{np.mean(used):.2f}",
        str(len(steps)),
        str(sum(len(result.hypotheses[0].tokens) for result in answered)),
        str(sum(step.compactions for step in steps)),
        str(sum(step.relayouts for step in steps)),
        str(sum(step.moves for step in steps)),
    )
