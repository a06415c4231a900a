"""How long a server takes until it answers, and how much memory it then has: `python -m tests.benchmarks.startup`.

Beside it, for scale: a Python that only imports what the server imports, and one that imports torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.processes import ROOT, environment, serving

IMPORTS = {
    "importing the server and its runtime": "import beamline.serving.server, onnxruntime",
    "importing torch (which the server does not)": "import torch",
}


def imported(code: str) -> tuple[float, float]:
    """Seconds, and resident MiB."""
    report = f"{code}; print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"
    began = time.perf_counter()
    found = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, env=environment(), cwd=ROOT, check=True
    )
    return time.perf_counter() - began, int(found.stdout) / 1024


def served(repository: Path, log: Path) -> tuple[float, float]:
    began = time.perf_counter()
    with serving(log, "--repo", str(repository)) as server:
        return time.perf_counter() - began, server.resident_bytes() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", type=Path, default=ROOT / "model_repo")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    models = ", ".join(sorted(path.parent.parent.name for path in arguments.repo.glob("*/*/manifest.json")))
    rows = [(name, [imported(code) for _ in range(arguments.repeat)]) for name, code in IMPORTS.items()]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        rows.append((f"serving {models}", [served(arguments.repo, log) for _ in range(arguments.repeat)]))
    print(f"{'best of ' + str(arguments.repeat):48} {'seconds':>8} {'MiB':>8}")
    for name, found in rows:
        print(f"{name:48} {min(seconds for seconds, _ in found):8.2f} {min(memory for _, memory in found):8.0f}")


if __name__ == "__main__":
    main()
