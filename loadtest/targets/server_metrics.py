"""The server's own `/metrics` during a run, read twice a second by a thread of the parent process."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from beamline.loadtest.errors import LoadTestError

_INTERVAL = 0.5
_TIMEOUT = 2.0
_QUEUE, _ACTIVE, _SLOTS = "beamline_queue_length", "beamline_active_slots", "beamline_slots"
_OCCUPANCY = "beamline_batch_occupancy"
_STEPS = "beamline_step_seconds"


@dataclass(frozen=True, slots=True)
class ModelReading:
    queue_length: float
    active_slots: float
    slots: float
    occupancy_sum: float  # of all steps so far
    occupancy_count: float
    step_seconds_sum: float
    step_seconds_count: float


@dataclass(frozen=True, slots=True)
class Reading:
    at: float  # by time.monotonic
    models: dict[str, ModelReading]


class Scraper:
    def __init__(self, address: str, token: str | None = None) -> None:
        self._url = f"{'' if '://' in address else 'http://'}{address}"
        if not self._url.endswith("/metrics"):
            self._url = self._url.rstrip("/") + "/metrics"
        self._request = urllib.request.Request(self._url)
        if token is not None:  # for this server only, wherever it may point us to
            self._request.add_unredirected_header("Authorization", f"Bearer {token}")
        self._readings: list[Reading] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)
        self.failures = 0

    def start(self) -> None:
        """Once for all stages. A wrong address is reported now, not after the run."""
        try:
            self._read()
        except urllib.error.HTTPError as error:
            advice = "; give the server's token with --token-file" if error.code in (401, 403) else ""
            raise LoadTestError(f"there are no metrics at {self._url}: {error}{advice}") from error
        except (OSError, ValueError) as error:
            raise LoadTestError(f"there are no metrics at {self._url}: {error}") from error
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def between(self, begin: float, end: float) -> list[Reading]:
        return [reading for reading in list(self._readings) if begin <= reading.at <= end]

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            try:
                self._read()
            except (OSError, ValueError):
                self.failures += 1  # that a server died is reported by its requests

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=_TIMEOUT) as response:
            text = response.read().decode()
        self._readings.append(Reading(time.monotonic(), parsed(text)))


def parsed(text: str) -> dict[str, ModelReading]:
    """Only the lines that are of use: parsing all of them would take the time of a hundred requests."""
    wanted = (_QUEUE, _ACTIVE, _SLOTS, f"{_OCCUPANCY}_sum", f"{_OCCUPANCY}_count", f"{_STEPS}_sum", f"{_STEPS}_count")
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(wanted))
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if "model" in sample.labels:
                values[sample.labels["model"]][sample.name] = sample.value
    return {model: ModelReading(*(of.get(name, 0.0) for name in wanted)) for model, of in values.items()}
