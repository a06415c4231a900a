"""The application on a real Ray, in an environment and a network of its own: what is in `inside/`."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.benchmarks.environments import python_of
from tests.support.processes import ROOT

pytestmark = pytest.mark.full


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, as root")
def test_what_a_cluster_of_two_replicas_promises() -> None:
    """Ray's gRPC proxy listens on every address, whatever it is told: so it gets a network without any but its own."""
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ray/inside/faults.py")
    command = " ".join(map(str, (python_of("ray"), *tests)))
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {command}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
