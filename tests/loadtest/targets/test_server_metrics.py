"""The server's metrics are read, with the token where one is needed."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.targets.server_metrics import Scraper, parsed
from beamline.serving.contract.stats import StepStats
from beamline.serving.telemetry.metrics import Metrics
from tests.loadtest.doubles import closed_port


def test_the_servers_metrics_are_understood():
    """The real page of the real server: a metric that is renamed there must be noticed here."""
    metrics = Metrics()
    metrics.slots.labels("en-de").set(4)
    observe = metrics.observer("en-de", "en-de", "1")
    step = StepStats(
        slots=4, active=3, remaining=2, queued=5, beam_width=1, cache_length=32, source_length=32, live_entries=9,
        admitted=1, encode_seconds=0.1, decode_seconds=0.2, step_seconds=0.3, moves=0, relayouts=0, compactions=0,
        finished=(),
    )  # fmt: skip
    observe(step)
    observe(step)
    reading = parsed(metrics.exposition().decode())["en-de"]
    assert (reading.queue_length, reading.active_slots, reading.slots) == (5, 2, 4)
    assert (reading.occupancy_sum, reading.occupancy_count) == (1.5, 2)
    assert [reading.step_seconds_sum, reading.step_seconds_count] == pytest.approx([0.6, 2])


class _Guarded(BaseHTTPRequestHandler):
    """Metrics for those who know the word; the others are sent elsewhere or away."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        self.asked.append((self.path, token))
        if self.path == "/moved/metrics":
            self.send_response(302)
            self.send_header("Location", "/metrics")
        else:
            self.send_response(200 if token == "Bearer sesame" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def test_the_token_is_shown_to_the_metrics_too():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        known = Scraper(address, "sesame")
        known.start()
        known.stop()
        assert len(known.between(0, time.monotonic())) == 1
        with pytest.raises(LoadTestError, match=r"HTTP Error 401: .*; give the server's token with --token-file"):
            Scraper(address).start()
        with pytest.raises(LoadTestError, match="HTTP Error 401"):
            Scraper(f"{address}/moved", "sesame").start()
        assert _Guarded.asked[-1] == ("/metrics", None)  # who is sent elsewhere does not take the token along
        server.shutdown()


def test_a_wrong_metrics_address_is_told_before_the_run():
    with pytest.raises(LoadTestError, match="there are no metrics at http://127"):
        Scraper(closed_port()).start()
