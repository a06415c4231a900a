"""Runs a command over the stub CUDA libraries: python -m tests.support.cuda_stub COMMAND ..."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.support.cuda_stub.build import ROOT, NotHere, build


def main() -> None:
    try:
        folder = build(ROOT / ".cache" / "cuda-stub")
    except NotHere as error:
        sys.exit(str(error))
    libraries = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = ":".join(libraries)
    if "CUDA_STUB_CONTROL" not in os.environ:
        os.environ["CUDA_STUB_CONTROL"] = tempfile.mkstemp(prefix="cuda-stub-")[1]
    command = sys.argv[1:]
    if command and command[0].endswith(".py") and Path(command[0]).exists():
        command.insert(0, sys.executable)
    os.execvp(command[0], command)


main()
