"""The protocols that can be measured, by their name on the command line."""

from __future__ import annotations

from collections.abc import Callable

from beamline.loadtest.targets.beamline_v1 import BeamlineTarget
from beamline.loadtest.targets.open_inference import OpenInferenceTarget
from beamline.loadtest.targets.target import Connection, Target

BEAMLINE, OPEN_INFERENCE = "beamline.v1", "open-inference"
TARGETS: dict[str, Callable[[Connection], Target]] = {BEAMLINE: BeamlineTarget, OPEN_INFERENCE: OpenInferenceTarget}
