"""Every metric of the server, declared once. They are fed by the engine's `StepStats`, and by the guard of the APIs.

Labels come only from what is loaded and from our own enumerations, never from a request: a client can't make
the number of time series grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder

from beamline.serving.contract.stats import DeviceStats, Finished, Outcome, StepStats
from beamline.serving.telemetry.gpus import TEXTS as GPU_TEXTS
from beamline.serving.telemetry.history import History
from beamline.serving.telemetry.load_report import LoadReport
from beamline.serving.telemetry.statistics import Statistics
from beamline.serving.telemetry.triton_metrics import LABELS, Triton, TritonMetrics
from beamline.version import beamline_version

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_OCCUPANCY = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_EOF = b"# EOF\n"
_BEAMS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class Declared:
    """A row of the table in docs/metrics.md. `name` is the one that queries use."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry if registry is not None else CollectorRegistry()

        self.declared: list[Declared] = []

        def declare(name: str, kind: str, labels: tuple[str, ...], text: str) -> None:
            self.declared.append(Declared(f"beamline_{name}", kind, labels, text))

        def counter(name: str, text: str, *labels: str) -> Counter:
            declare(f"{name}_total", "counter", labels, text)
            return Counter(f"beamline_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            declare(name, "gauge", ("model",), text)
            return Gauge(f"beamline_{name}", text, ["model"], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            declare(name, "histogram", labels, text)
            return Histogram(f"beamline_{name}", text, labels, buckets=buckets, registry=registry)

        # Calls, as the APIs see them.
        self.calls = counter("calls", "Calls that were answered or refused, by any API.", "method", "code")
        self.call_seconds = histogram("call_seconds", "From a call to its answer.", _LATENCY, "method")
        self.refused = counter("refused", "Calls that were refused, by reason.", "reason")

        self.loads = counter("model_loads", "Model versions that were loaded, failed to, or were given up.", "outcome")
        for outcome in ("loaded", "failed", "given_up"):  # 0 before the first, or nobody could see that it became 1
            self.loads.labels(outcome)

        # Requests, as an engine sees them: one for every text, or part of a split text.
        self.requests = counter("requests", "Requests that left the engine.", "model", "outcome")
        self.request_seconds = histogram("request_seconds", "From submission to the answer.", _LATENCY, "model")
        self.queue_seconds = histogram("queue_seconds", "From submission to a slot.", _LATENCY, "model")
        self.first_token_seconds = histogram(
            "first_token_seconds", "From submission to the first decoded step.", _LATENCY, "model"
        )
        self.source_tokens = counter("source_tokens", "Tokens read, of answered requests.", "model")
        self.target_tokens = counter("target_tokens", "Tokens of the best hypotheses.", "model")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached_prompt_tokens = counter(
            "cached_prompt_tokens", "Tokens of prompts that were found in the prefix cache.", "model"
        )
        self.prefix_cache_bytes = gauge("prefix_cache_bytes", "Size of the prefix cache.")

        # Steps.
        self.slots = gauge("slots", "Requests that can be decoded at once.")
        self.active_slots = gauge("active_slots", "Requests that took part in the last step.")
        self.queue_length = gauge("queue_length", "Requests that wait for a slot, or to be scored.")
        self.cache_length = gauge("cache_length", "Cache bucket of the last step, in entries per slot.")
        self.live_cache_entries = gauge("live_cache_entries", "Cache entries in use, over all slots.")
        self.step_seconds = histogram("step_seconds", "One step of the engine.", _STEP, "model")
        self.decode_seconds = histogram("decode_seconds", "The decoder's part of a step.", _STEP, "model")
        self.encode_seconds = histogram(
            "encode_seconds", "The encoder's part of a step that admitted requests.", _STEP, "model"
        )
        self.batch_occupancy = histogram("batch_occupancy", "Share of the slots that a step used.", _OCCUPANCY, "model")
        self.beam_width = histogram("beam_width", "Beams per request of a decoding step.", _BEAMS, "model")
        self.moves = counter("cache_moves", "Slots that moved into a freed one.", "model")
        self.relayouts = counter("cache_relayouts", "Changes of the cache bucket.", "model")
        self.compactions = counter("cache_compactions", "Compactions of dead branches.", "model")

        # GPUs.
        self.gpu_used_bytes = gauge("gpu_used_bytes", "GPU memory in a model's slots, without ONNX Runtime's own.")
        self.gpu_reserved_bytes = gauge("gpu_reserved_bytes", "GPU memory that a model's slots hold on to.")
        self.gpu_free_bytes = gauge("gpu_free_bytes", "GPU memory that nobody has, on the GPUs of a model.")
        self.gpu_steps = counter("gpu_steps", "Decode steps that a GPU was asked for.", "model")
        self.gpu_graph_replays = counter("gpu_graph_replays", "Of them, as a recorded CUDA graph.", "model")
        self.gpu_step_seconds = counter("gpu_step_seconds", "What they took on the GPU, by its own clock.", "model")
        self.gpu_copies = counter("gpu_copies", "Copies that a GPU was asked for by the host.", "model")
        self.gpu_copied_bytes = counter("gpu_copied_bytes", "What they copied.", "model")
        self.gpu_waits = counter("gpu_waits", "How often the host stood still for a GPU.", "model")
        for name, text in GPU_TEXTS.items():  # which `watch_gpus` collects
            declare(name, "gauge", ("gpu",), text)

        declare("build_info", "gauge", ("version",), "The version of the server.")
        Info("beamline_build", "The version of the server.", registry=registry).info({"version": beamline_version()})

        self.history = History()
        self.load = LoadReport()
        self.triton = TritonMetrics()
        self.declared += [Declared(one.value.name, one.value.kind, LABELS, one.value.text) for one in Triton]

    def observer(
        self, label: str, model: str, version: str, statistics: Statistics | None = None
    ) -> Callable[[StepStats], None]:
        """The consumer for one model's engine, which counts for Prometheus, for Triton's dashboards, and for the
        version's own `statistics`. It runs on the engine's thread at every step."""
        ours, own = _StepObserver(self, label), statistics or Statistics()
        past = self.history.of(label)
        self.triton.declare(model, version)

        def observe(step: StepStats) -> None:
            ours(step)
            past.observe(step)
            self.load.step(label, step)
            self.triton.step(model, version, step)
            own.observe(step)

        return observe

    def exposition(self) -> bytes:
        return self.negotiated("")[0]

    def negotiated(self, accept: str) -> tuple[bytes, str]:
        """In the format that a scraper's header accepts: Prometheus's text or OpenMetrics; and its content type."""
        encode, content_type = choose_encoder(accept)
        ours = encode(self.registry)
        if content_type.startswith("application/openmetrics-text"):
            return ours.removesuffix(_EOF) + self.triton.exposition(open_metrics=True) + _EOF, content_type
        return ours + self.triton.exposition(), content_type


class _StepObserver:
    """Looks the labels up once: that costs more than counting."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._requests = {outcome: metrics.requests.labels(model, outcome.value) for outcome in Outcome}
        self._request_seconds = metrics.request_seconds.labels(model)
        self._queue_seconds = metrics.queue_seconds.labels(model)
        self._first_token_seconds = metrics.first_token_seconds.labels(model)
        self._source_tokens = metrics.source_tokens.labels(model)
        self._target_tokens = metrics.target_tokens.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._cached_prompt_tokens = metrics.cached_prompt_tokens.labels(model)
        self._prefix_cache_bytes = metrics.prefix_cache_bytes.labels(model)
        self._active_slots = metrics.active_slots.labels(model)
        self._queue_length = metrics.queue_length.labels(model)
        self._cache_length = metrics.cache_length.labels(model)
        self._live_cache_entries = metrics.live_cache_entries.labels(model)
        self._step_seconds = metrics.step_seconds.labels(model)
        self._decode_seconds = metrics.decode_seconds.labels(model)
        self._encode_seconds = metrics.encode_seconds.labels(model)
        self._batch_occupancy = metrics.batch_occupancy.labels(model)
        self._beam_width = metrics.beam_width.labels(model)
        self._moves = metrics.moves.labels(model)
        self._relayouts = metrics.relayouts.labels(model)
        self._compactions = metrics.compactions.labels(model)
        self._metrics, self._model = metrics, model
        self._device: DeviceStats | None = None  # as it was last

    def __call__(self, step: StepStats) -> None:
        self._active_slots.set(step.remaining)
        self._queue_length.set(step.queued)
        self._cache_length.set(step.cache_length)
        self._live_cache_entries.set(step.live_entries)
        self._step_seconds.observe(step.step_seconds)
        if step.active:
            self._batch_occupancy.observe(step.active / step.slots)
        if step.beam_width:
            self._decode_seconds.observe(step.decode_seconds)
            self._beam_width.observe(step.beam_width)
        if step.admitted:
            self._encode_seconds.observe(step.encode_seconds)
        for count, copies in (
            (step.moves, self._moves),
            (step.relayouts, self._relayouts),
            (step.compactions, self._compactions),
        ):
            if count:
                copies.inc(count)
        if step.prompt_tokens:
            self._prompt_tokens.inc(step.prompt_tokens)
            self._cached_prompt_tokens.inc(step.cached_prompt_tokens)
            self._prefix_cache_bytes.set(step.prefix_cache_bytes)
        if step.device is not None:
            self._measure(step.device)
        for finished in step.finished:
            self._finish(finished)

    def _measure(self, now: DeviceStats) -> None:
        """Only of models on a GPU are there such series."""
        metrics, model = self._metrics, self._model
        since = now if self._device is None else now - self._device
        self._device = now
        metrics.gpu_used_bytes.labels(model).set(now.used_bytes)
        metrics.gpu_reserved_bytes.labels(model).set(now.reserved_bytes)
        metrics.gpu_free_bytes.labels(model).set(now.free_bytes)
        for counter, count in (
            (metrics.gpu_steps, since.steps),
            (metrics.gpu_graph_replays, since.replayed),
            (metrics.gpu_step_seconds, since.seconds),
            (metrics.gpu_copies, since.copies),
            (metrics.gpu_copied_bytes, since.copied_bytes),
            (metrics.gpu_waits, since.waits),
        ):
            counter.labels(model).inc(max(0, count))

    def _finish(self, finished: Finished) -> None:
        self._requests[finished.outcome].inc()
        self._queue_seconds.observe(finished.queue_seconds)
        self._request_seconds.observe(finished.total_seconds)
        if finished.first_token_seconds is not None:
            self._first_token_seconds.observe(finished.first_token_seconds)
        self._source_tokens.inc(finished.source_tokens)
        self._target_tokens.inc(finished.target_tokens)
