"""TensorRT itself: one of two libraries with the same interface, and what it says while it works."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from beamline.serving.errors import ConversionError
from beamline.version import install_hint

# It says this of every int64 tensor. We bind them as int64, so there is nothing to make sure of.
_HARMLESS = re.compile(r"Make sure (input|output) \S+ has Int64 binding")
_UNUSED = re.compile(r"unused input", re.IGNORECASE)
# Kernels ("tactics") that could not be measured, or for which the GPU had no memory just then. TensorRT reports them as
# errors, and builds the plan of the others.
_TACTICS = re.compile(
    r"skipping tactic|tactic device request|out.?of.?memory|insufficient memory|memory .{0,40}could not be allocated",
    re.IGNORECASE,
)
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True)
class Library:
    name: str
    module: Any

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def ahead_of_time(self) -> bool:
        """Builds for GPUs that are not there; and keeps no timings, because it measures nothing."""
        return self.name == "tensorrt_rtx"


def find_library(wanted: str | None = None) -> Library:
    """The named one; or `tensorrt_rtx`, which builds anywhere, before `tensorrt`."""
    names = [wanted] if wanted else ["tensorrt_rtx", "tensorrt"]
    reasons = []
    for name in names:
        try:
            return Library(name, importlib.import_module(name))
        except Exception as error:  # a package without its libraries fails in many ways
            reasons.append(f"{name}: {error}")
    which = f"and {wanted} can't" if wanted else "and neither can"
    hint = install_hint((wanted or names[0]).replace("_", "-"))
    raise ConversionError(
        f"plans are built by tensorrt-rtx (any machine) or tensorrt (on the GPU itself), {which} be loaded "
        f"({'; '.join(reasons)}): {hint}"
    )


Stage = Literal["preparing", "parsing", "timing cache", "building"]


@dataclass
class BuildLog:
    """What was said while one plan was built. What a message means depends on what was being done."""

    stage: Stage = "preparing"
    warnings: list[str] = field(default_factory=list)  # of the parser; others are about the driver or the GPU
    unused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tactics: list[str] = field(default_factory=list)  # errors that only matter where there is no plan
    timings: list[str] = field(default_factory=list)  # of a timing cache that is of no use; the plan is not concerned
    activation_bytes: int | None = None

    @contextlib.contextmanager
    def during(self, stage: Stage) -> Iterator[None]:
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def hear(self, severity: str, message: str) -> None:
        if self.stage == "timing cache":
            if severity in ("INTERNAL_ERROR", "ERROR", "WARNING"):
                self.timings.append(message)
            return
        if severity in ("INTERNAL_ERROR", "ERROR"):
            tactic = self.stage == "building" and _TACTICS.search(message)
            (self.tactics if tactic else self.errors).append(message)
        elif severity == "WARNING" and self.stage == "parsing" and not _HARMLESS.search(message):
            self.warnings.append(message)
        if _UNUSED.search(message):
            self.unused.append(message)
        found = _ACTIVATIONS.search(message)
        if found:
            self.activation_bytes = int(found[1])

    def problems(self) -> list[str]:
        """Anything that may mean that the plan does not compute what the graph says."""
        return [*self.errors, *self.warnings, *self.unused]


_listeners: dict[str, Any] = {}


def logger_for(library: Library, log: BuildLog) -> Any:
    """The library's logger, which writes into this log from now on. There is one for all builds: TensorRT ignores
    another one as long as anything lives that was made with the first, and a failed build's traceback may keep that."""
    trt = library.module

    class Listener(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.entries = log

        def log(self, severity: Any, message: str) -> None:
            self.entries.hear(severity.name, message)

    listener = _listeners.get(library.name) or Listener()
    listener.entries = log
    _listeners[library.name] = listener
    return listener
