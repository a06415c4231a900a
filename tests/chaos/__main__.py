"""make chaos: hours of faults against a real server, on the loopback interface alone.

A server of the shipped en-de and of copies of it, whose folders are replaced all the time, is asked by clients that
compare every answer with a quiet server's. Meanwhile, at random: calls at three times what it can do, calls that are
cancelled, readers that don't read, garbage on every port, reloads, and now and then its end by SIGTERM or SIGKILL,
behind which another one is started on the same ports. At the end:

- no answer was wrong, and no call was left without an answer or a status;
- every refusal that clients saw is counted once in the server's metrics, of every server that ended in good order;
- memory and file descriptors are what they were after the warm-up, within 5 %, of the server that lived longest.

CHAOS_MINUTES (60) says how long, CHAOS_SEED what happens.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import Chaos

MINUTES = float(os.environ.get("CHAOS_MINUTES", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


def main() -> int:
    print(f"chaos for {MINUTES:g} minutes (CHAOS_MINUTES), seed {SEED} (CHAOS_SEED)", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), 60 * MINUTES, random.Random(SEED))
        problems = asyncio.run(chaos.run())
        print(chaos.report(), flush=True)
        for problem in problems:
            print(f"FAILED: {problem}", flush=True)
        if problems:
            for log in sorted(Path(folder).glob("log-*.txt")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
