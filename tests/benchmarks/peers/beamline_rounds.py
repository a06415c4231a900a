"""Translates lines by `beamline.load`, as often as it is told to: MODEL SOURCE OUT BEAM THREADS SLOTS."""

from __future__ import annotations

import sys

from beamline import load
from tests.benchmarks.peers import rounds


def main() -> None:
    path, source, out, beam, threads, slots = sys.argv[1:]
    with load(path, threads=int(threads), slots=int(slots)) as model:
        rounds.run(source, out, lambda lines: [each.text for each in model.translate(lines, beam_size=int(beam))])


if __name__ == "__main__":
    main()
