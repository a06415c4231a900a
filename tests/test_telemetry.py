"""The runtime that we load tells nobody what it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment


@pytest.mark.parametrize("package", ["beamline.serving.backends.cpu", "converters"])
def test_the_runtime_writes_no_device_id_and_starts_no_uploader(package: str, tmp_path: Path) -> None:
    graph = next((ROOT / "model_repo" / "en-de").glob("*/encoder.onnx"))
    code = f"import {package}, onnxruntime; onnxruntime.InferenceSession({str(graph)!r})"
    variables = {name: value for name, value in environment().items() if not name.startswith(("ORT_", "CI"))}
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**variables, **home}, timeout=300)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
