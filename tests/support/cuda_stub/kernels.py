"""Our CUDA kernels as PTX, which a driver compiles for its GPU when it loads them: `python -m
tests.support.cuda_stub.kernels` writes gather.ptx anew, with NVRTC, which needs no GPU."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.cuda_stub.build import KERNELS

SOURCE, COMPILED = KERNELS / "gather.cu", KERNELS / "gather.ptx"
# The oldest GPUs and drivers that are served: loops and loads need nothing newer.
_TARGET, _VERSION = "compute_75", "7.0"
_HEAD = "// Made of gather.cu by `python -m tests.support.cuda_stub.kernels`.\n"


def compiled(target: str = _TARGET) -> str:
    nvrtc = _nvrtc()
    source = SOURCE.read_bytes()
    options = [f"--gpu-architecture={target}".encode()]
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source, b"gather.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    said = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, said)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(said.decode())
    ptx = b" " * _checked(nvrtc, nvrtc.nvrtcGetPTXSize(program))
    _checked(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
    text = re.sub(r"//.*\n", "", ptx.decode().rstrip("\0 \n"))
    return _HEAD + re.sub(r"\.version \S+", f".version {_VERSION}", text).lstrip() + "\n"


def _nvrtc() -> Any:
    folder = Path(sys.prefix) / "cuda" / "nvidia"
    # Its built-in functions first: where they lie beside it, not every release of NVRTC finds them itself.
    for library in (*folder.glob("**/libnvrtc-builtins.so.*"), *folder.glob("**/libnvrtc.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import nvrtc

    return nvrtc


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
    return values[0] if values else None


if __name__ == "__main__":
    COMPILED.write_text(compiled())
