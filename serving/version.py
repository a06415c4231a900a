"""Which beamline this is."""

from __future__ import annotations

from importlib import metadata


def beamline_version() -> str:
    try:
        return metadata.version("beamline")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
