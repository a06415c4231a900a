"""Which beamline this is, and how more of it is installed."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "beamline-serving"  # `beamline` in the package registry is somebody else's


def beamline_version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def install_hint(extra: str) -> str:
    """What installs an extra: the distribution is not in the package registry, so it comes from the sources."""
    return f"in this project's folder, pip install '.[{extra}]'"
