"""`python -m tests.benchmarks.ray_proxy`: what Ray's gRPC proxy costs, beside Envoy and beside nothing.

Two servers that compute nothing, exactly on time (`--fake`), reached in three ways: by a client that goes round,
through Envoy, and as two replicas behind Ray's proxy. The processor time a call is of all processes but the load
tester's, and does not depend on how busy the machine is otherwise; latency and throughput do.
"""

from __future__ import annotations

import sys

from tests.ray.environment import POSSIBLE, run_inside


def main() -> int:
    if not POSSIBLE:
        print("this needs unshare, as root: Ray's proxy would listen on every address of this machine")
        return 1
    done = run_inside("-m", "tests.ray.inside.proxy_cost", *sys.argv[1:], seconds=3600)
    print(done.stdout if done.returncode == 0 else done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
