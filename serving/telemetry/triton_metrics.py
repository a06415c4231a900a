"""The metrics of Triton's dashboards, under their exact names.

prometheus_client adds `_total` to every counter, so these are counted and written here. A *request* is one call,
by any API; an *inference* is one sequence of it, as a batch's element is for Triton.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

from beamline.serving.contract.stats import Outcome, StepStats

LABELS = ("model", "version")


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    kind: str  # counter or gauge
    text: str


class Triton(Enum):
    """Every family. The sums of times divide by the counts of requests or of inferences."""

    SUCCESS = Family("nv_inference_request_success", "counter", "Calls that were answered.")
    FAILURE = Family("nv_inference_request_failure", "counter", "Calls that failed or were given up.")
    COUNT = Family("nv_inference_count", "counter", "Sequences that were answered.")
    EXECUTIONS = Family("nv_inference_exec_count", "counter", "Steps, each a batch of the active sequences.")
    REQUEST_US = Family("nv_inference_request_duration_us", "counter", "From a call to its answer, of answered calls.")
    QUEUE_US = Family("nv_inference_queue_duration_us", "counter", "Sequences' time in the queue.")
    INPUT_US = Family(
        "nv_inference_compute_input_duration_us",
        "counter",
        "The host's work before the engine, of answered calls: texts are checked, split and tokenised.",
    )
    INFER_US = Family(
        "nv_inference_compute_infer_duration_us", "counter", "Sequences' time from the queue to their last token."
    )
    OUTPUT_US = Family(
        "nv_inference_compute_output_duration_us",
        "counter",
        "The host's work behind the engine, of answered calls: tokens become text, labels or vectors.",
    )
    PENDING = Family("nv_inference_pending_request_count", "gauge", "Sequences that wait for a slot, or to be scored.")


class TritonMetrics:
    """Thread-safe: it is fed by engines' threads and by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], dict[Triton, float]] = defaultdict(lambda: dict.fromkeys(Triton, 0.0))

    def declare(self, model: str, version: str) -> None:
        """Lists the model from now on, with zeros."""
        with self._lock:
            self._values[model, version]

    def call(self, model: str, version: str, seconds: float, answered: bool) -> None:
        with self._lock:
            values = self._values[model, version]
            values[Triton.SUCCESS if answered else Triton.FAILURE] += 1
            if answered:
                values[Triton.REQUEST_US] += 1e6 * seconds

    def host_worked(self, model: str, version: str, reading: float, writing: float) -> None:
        """Adds the seconds that the host worked for one call."""
        with self._lock:
            values = self._values[model, version]
            values[Triton.INPUT_US] += 1e6 * reading
            values[Triton.OUTPUT_US] += 1e6 * writing

    def step(self, model: str, version: str, step: StepStats) -> None:
        with self._lock:
            values = self._values[model, version]
            values[Triton.PENDING] = step.queued
            if step.active:
                values[Triton.EXECUTIONS] += 1
            for finished in step.finished:
                values[Triton.QUEUE_US] += 1e6 * finished.queue_seconds
                if finished.outcome is Outcome.OK:
                    values[Triton.COUNT] += 1
                    values[Triton.INFER_US] += 1e6 * (finished.total_seconds - finished.queue_seconds)

    def value(self, family: Triton, model: str, version: str) -> float:
        with self._lock:
            return self._values[model, version][family]

    def exposition(self, open_metrics: bool = False) -> bytes:
        """In Prometheus's text format, or in OpenMetrics. There a counter's name must end with _total, so that
        these, whose names are Triton's, have no type."""
        with self._lock:
            values = {labels: dict(found) for labels, found in self._values.items()}
        lines = []
        for family in Triton:
            about = family.value
            lines += [
                f"# HELP {about.name} {about.text}",
                f"# TYPE {about.name} {'unknown' if open_metrics else about.kind}",
            ]
            for (model, version), found in values.items():
                labels = f'model="{_escaped(model)}",version="{_escaped(version)}"'
                lines.append(f"{about.name}{{{labels}}} {found[family]:.17g}")
        return "\n".join([*lines, ""]).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
