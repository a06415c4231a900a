"""Loses the device at one call of CUDA's after the other while a model answers, or is loaded, in a process that may end
by it: python -m tests.cuda_stub.losing talk|load KIND FIRST. It says which one is next, beginning with the FIRST, and
`all` after the last. After some it ends, because nothing is given back of a device that is lost."""

from __future__ import annotations

import gc
import logging
import sys

from tests.cuda_stub.test_failing_calls import calls_of_a_load, calls_of_a_talk, is_refused, talk_until_lost
from tests.support.cuda_stub.plausible import make_plausible
from tests.support.cuda_stub.stub import Stub

SOME = 30


def main() -> None:
    what, kind, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    make_plausible()
    stub = Stub.of_this_process()
    calls_of = calls_of_a_talk if what == "talk" else calls_of_a_load
    calls = list(enumerate(calls_of(kind, stub, full=True)))
    for place, (name, number) in calls[first : first + SOME]:
        print(place, name, number, flush=True)
        if what == "talk":
            talk_until_lost(kind, stub, name, number)
        else:
            is_refused(kind, stub, name, number, loses=True)
        gc.collect()
        stub.heal()
    if first + SOME >= len(calls):
        print("all")


if __name__ == "__main__":
    main()
