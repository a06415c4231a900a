"""The models in the box, whatever version they have come to."""

from __future__ import annotations

from pathlib import Path

from beamline.serving.models.repository import newest, scan
from tests.support.processes import ROOT


def shipped(name: str) -> Path:
    """The folder of its newest version."""
    return newest(scan(ROOT / "model_repo").models[name]).folder
