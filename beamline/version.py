"""The release of this installation, and the commands that install its extras."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "beamline-serving"  # `beamline` in the package registry is somebody else's


# What to install for a module that is missing.
_EXTRAS = {
    "onnxruntime": "cpu",
    "tensorrt": "tensorrt",
    "cuda": "gpu",
    "onnx": "cpu",
    "torch": "cpu,convert",
    "onnxscript": "cpu,convert",
    "onnx_ir": "cpu,convert",
    "safetensors": "cpu,convert",
    "transformers": "cpu,convert",
}


def beamline_version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def install_hint(extra: str) -> str:
    """What installs an extra: the distribution is not in the package registry, so it comes from the sources. What needs
    torch gets an environment of its own, as the tutorial has it: torch is installed before the rest, and alone, else
    pip may take a build with gigabytes of CUDA."""
    if "convert" not in extra:
        return f"in this project's folder, pip install '.[{extra}]'"
    pip = ".venv-convert/bin/pip install"
    return (
        "it belongs in an environment of its own; in this project's folder, python3 -m venv .venv-convert, then "
        f"{pip} -c constraints.txt torch (docs/tutorial.md says which build), then "
        f"{pip} -c constraints.txt '.[{extra}]', and call .venv-convert/bin/beamline"
    )


def needed(error: ModuleNotFoundError) -> str | None:
    """What is missing, and what installs it; None where it is none of what the extras bring."""
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    return None if extra is None else f"needs {module}, which is not installed: {install_hint(extra)}"
