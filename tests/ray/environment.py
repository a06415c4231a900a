"""Ray's own environment, and a network without any address but its own: Ray's gRPC proxy listens on all there are,
whatever it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from tests.benchmarks.environments import python_of
from tests.support.processes import ROOT

# Ray starts its processes at niceness 15, which would test and measure whoever else uses this machine.
_VARIABLES = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
POSSIBLE = shutil.which("unshare") is not None and os.geteuid() == 0


def run_inside(
    *arguments: str, seconds: float = 800, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, to its end; `variables` of the environment."""
    command = " ".join((str(python_of("ray")), *arguments))
    return subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {command}"],
        cwd=ROOT,
        env={**os.environ, **_VARIABLES, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
