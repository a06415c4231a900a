"""Compiles the stub CUDA libraries with gcc: `device.c` and `streams.c` are shared by libcuda.so.1 (`driver.c`),
libcudart.so.13 (`runtime.c`) and the others. Which symbols there must be is read from ONNX Runtime's provider and from
cuda.h; those that nobody has written are generated here. The headers are those of PyPI's packages
(`make test-cuda-stub` puts them there).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KERNELS = ROOT / "serving" / "backends" / "kernels"
_FLAGS = ("-O1", "-g", "-fPIC", "-shared", "-w", "-Wl,-rpath,$ORIGIN")
# What creates something gives a handle back; all else is content.
_CREATES = re.compile(r"(Create_v2|LtCreate|DescCreate|PreferenceCreate|LayoutCreate|^cudnnCreate\w*|CreateGenerator)$")
# As their documentation says, these wait for the whole device.
_WAITING = frozenset({"cublasDestroy_v2", "cublasLtDestroy", "cudnnDestroy"})


class NotHere(Exception):
    """Why the stub can't be built; a sentence."""


def headers() -> Path:
    found = sorted(Path(sys.prefix).glob("cuda/nvidia/**/cuda.h"))
    if not found:
        raise NotHere(
            "CUDA's headers are not in this environment: run `make test-cuda-stub`, which makes one with them"
        )
    return found[0].parent


def build(cache: Path) -> Path:
    """The folder of the libraries; made once for the same sources."""
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        raise NotHere("the stub CUDA libraries are compiled with gcc, and there is none here: apt-get install gcc")
    include, provider = headers(), _provider()
    sources = [*sorted(HERE.glob("*.[ch]")), HERE / "build.py", KERNELS / "gather.cu"]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    key.update(f"{provider.stat().st_size} {include}".encode())
    folder = cache / key.hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as made:
            work = Path(made) / "stub"
            work.mkdir()
            _compile(work, include, provider)
            with contextlib.suppress(OSError):  # another process was faster
                work.rename(folder)
    return folder


def _provider() -> Path:
    spec = importlib.util.find_spec("onnxruntime")
    path = Path(str(spec.origin)).parent / "capi" / "libonnxruntime_providers_cuda.so" if spec else None
    if path is None or not path.exists():
        raise NotHere("onnxruntime-gpu is not in this environment")
    return path


def _compile(folder: Path, include: Path, provider: Path) -> None:
    wanted = _imported(provider)
    _gcc(folder, include, "libcudastub.so", "device.c", "streams.c")
    _gcc(folder, include, "libcuda.so.1", "driver.c", "kernels.c", generated=_driver(include), version=False)
    for library in ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"):
        own = ["runtime.c"] if library.startswith("libcudart") else []
        names = wanted.get(library, set()) - _defined(*own)
        _gcc(folder, include, library, *own, generated=_generated(names), version=True)
    _gcc(folder, include, "libnvidia-ml.so.1", "nvml.c", version=False)
    # cuDNN is looked up by name when it is needed.
    names = {name.decode() for name in re.findall(rb"\bcudnn[A-Z][A-Za-z0-9_]+(?=\0)", provider.read_bytes())}
    _gcc(folder, include, "libcudnn.so.9", "cudnn.c", generated=_generated(names - _defined("cudnn.c")), version=False)


def _imported(provider: Path) -> dict[str, set[str]]:
    """By library: the symbols that ONNX Runtime's provider takes from it."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", provider], capture_output=True, text=True, check=True)
    found: dict[str, set[str]] = {}
    for name, library in re.findall(r" U (\w+)@(lib\S+)", listed.stdout):
        found.setdefault(library, set()).add(name)
    return found


def _defined(*sources: str) -> set[str]:
    text = "".join((HERE / source).read_text() for source in sources)
    return set(re.findall(r"^(?:[\w]+[ *]+)+(\w+)\(", text, re.MULTILINE))


def _generated(names: set[str]) -> str:
    lines = ['#include "device.h"', "#include <stdlib.h>"]
    for name in sorted(names):
        if _CREATES.search(name):
            lines.append(f"int {name}(void **made) {{ NOTE(0); *made = calloc(1, 4096); library_holds(1); return 0; }}")
        elif name in _WAITING:
            free = "if (made) library_holds(-1), free(made)"
            lines.append(f"int {name}(void *made) {{ NOTE(0); int e = wait_for_device(__func__); {free}; return e; }}")
        elif "Destroy" in name and _CREATES.search(name.replace("Destroy", "Create")):
            lines.append(f"int {name}(void *made) {{ NOTE(0); if (made) library_holds(-1), free(made); return 0; }}")
        elif re.search(r"(StatusName|StatusString)$", name):
            lines.append(f'const char *{name}(int status) {{ return "a stub\'s status"; }}')
        else:
            lines.append(f"int {name}() {{ NOTE(0); return 0; }}")
    return "\n".join(lines) + "\n"


def _driver(include: Path) -> str:
    """Every function of cuda.h that driver.c lacks says that it is not supported; and the table for cuGetProcAddress,
    in which a name without a version means the newest one."""
    header, written = (include / "cuda.h").read_text(), _defined("driver.c")
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header)) | set(re.findall(r"(cu[A-Z]\w+_v\d)\b", header))
    newest = {
        name: re.sub(r"_pt[sd][sz]$", "", target)
        for name, target in re.findall(
            r"^\s*#define (cu[A-Z]\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+?)\)?\s*$", header, re.M
        )
    }
    names = {name for name in names | set(newest.values()) if not re.search(r"_pt[sd][sz]$", name)}
    names |= {name for name in written if name.startswith("cu")}
    lines = ['#include "device.h"', "struct entry { const char *name; void *function; };"]
    for name in sorted(names):
        body = ";" if name in written else f' {{ note("not supported: {name}", 0); return 801; }}'
        lines.append(f"{'extern ' if name in written else ''}int {name}(){body}")
    rows = {name: newest.get(name, name) for name in names} | {n: t for n, t in newest.items() if t in names}
    rows |= {f"{name}{ending}": target for name, target in list(rows.items()) for ending in ("_ptsz", "_ptds")}
    lines.append("const struct entry entries[] = {")
    lines += [f'    {{"{name}", (void *){target}}},' for name, target in sorted(rows.items())]
    return "\n".join([*lines, "};", f"const int entry_count = {len(rows)};"]) + "\n"


def _gcc(folder: Path, include: Path, library: str, *sources: str, generated: str = "", version: bool = False) -> None:
    base = library.split(".so")[0]
    command = ["gcc", *_FLAGS, f"-I{include}", f"-I{HERE}", f"-I{KERNELS}", f"-Wl,-soname,{library}"]
    command += [str(HERE / source) for source in sources]
    if generated:
        (folder / f"{base}.c").write_text(generated)
        command.append(str(folder / f"{base}.c"))
    if version:
        (folder / f"{base}.map").write_text(f"{library} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={folder / f'{base}.map'}")
    command += ["-o", str(folder / library), f"-L{folder}", "-lpthread"]
    if library != "libcudastub.so":
        command.append("-lcudastub")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"gcc could not compile {library}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        print(build(ROOT / ".cache" / "cuda-stub"))
    except NotHere as error:
        sys.exit(str(error))
