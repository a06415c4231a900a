from __future__ import annotations

import re
from pathlib import Path

from beamline.serving.api.status import _STATUSES
from beamline.serving.contract.stats import DeviceStats, Finished, Outcome, StepStats
from beamline.serving.telemetry import metrics_page
from beamline.serving.telemetry.gpus import GpuCollector
from beamline.serving.telemetry.metrics import Metrics
from tests.serving.telemetry.test_gpus import management_library
from tests.support.processes import ROOT


def step(**changes: object) -> StepStats:
    values: dict[str, object] = {
        "slots": 8,
        "active": 4,
        "remaining": 3,
        "queued": 2,
        "beam_width": 5,
        "cache_length": 96,
        "source_length": 32,
        "live_entries": 123,
        "admitted": 1,
        "encode_seconds": 0.002,
        "decode_seconds": 0.02,
        "step_seconds": 0.03,
        "moves": 1,
        "relayouts": 2,
        "compactions": 3,
        **changes,
    }
    return StepStats(**values)  # type: ignore[arg-type]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"beamline_{name}", {"model": "de", **labels})


def test_a_step_is_counted() -> None:
    metrics = Metrics()
    metrics.observer("de", "de", "1")(step())
    expected = {
        "active_slots": 3,
        "queue_length": 2,
        "cache_length": 96,
        "live_cache_entries": 123,
        "step_seconds_sum": 0.03,
        "decode_seconds_sum": 0.02,
        "encode_seconds_sum": 0.002,
        "batch_occupancy_sum": 0.5,
        "beam_width_sum": 5,
        "cache_moves_total": 1,
        "cache_relayouts_total": 2,
        "cache_compactions_total": 3,
    }
    assert {name: value(metrics, name) for name in expected} == expected


def test_a_step_without_decoding_says_nothing_about_batches() -> None:
    metrics = Metrics()
    metrics.observer("de", "de", "1")(step(active=0, beam_width=0, admitted=0, live_entries=0, queued=0))
    assert value(metrics, "batch_occupancy_count") == 0
    assert value(metrics, "encode_seconds_count") == 0


def test_the_last_step_leaves_no_slot_active() -> None:
    metrics = Metrics()
    metrics.observer("de", "de", "1")(step(active=1, remaining=0))
    assert value(metrics, "active_slots") == 0


def test_finished_requests_are_counted_by_outcome() -> None:
    metrics = Metrics()
    done = Finished(Outcome.OK, 0.01, 0.03, 0.2, source_tokens=7, target_tokens=9)
    gone = Finished(Outcome.CANCELLED, 0.02, None, 0.1, source_tokens=5, target_tokens=0)
    metrics.observer("de", "de", "1")(step(finished=(done, gone)))
    assert value(metrics, "requests_total", outcome="ok") == 1
    assert value(metrics, "requests_total", outcome="cancelled") == 1
    assert value(metrics, "requests_total", outcome="failed") == 0
    assert value(metrics, "queue_seconds_count") == 2
    assert value(metrics, "first_token_seconds_count") == 1
    assert value(metrics, "source_tokens_total") == 12
    assert value(metrics, "target_tokens_total") == 9


def test_models_are_apart_and_registries_too() -> None:
    first, second = Metrics(), Metrics()
    first.observer("de", "de", "1")(step())
    first.observer("fr", "fr", "1")
    assert value(first, "step_seconds_count") == 1
    assert first.registry.get_sample_value("beamline_step_seconds_count", {"model": "fr"}) == 0
    assert value(second, "step_seconds_count") is None
    assert b"beamline_build_info{" in second.exposition()


# -- the page, and Triton's names ----------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page.page(), "run 'make docs'"


def test_the_page_lists_every_outcome_and_reason() -> None:
    named = set(re.findall(r"`(\w+)`", metrics_page._VALUES))
    reasons = {reason for _, reason in _STATUSES.values() if reason is not None}
    assert reasons | {outcome.value for outcome in Outcome} <= named
    # and those that are counted in passing
    sources = "\n".join(path.read_text() for path in (ROOT / "serving").rglob("*.py"))
    in_passing = set(re.findall(r"\brefused\(\"(\w+)\"\)", sources)) | set(
        re.findall(r"\boutcome = \"(\w+)\"", sources)
    )
    assert {"connections", "given_up"} <= in_passing <= named


def exposed(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Name -> labels -> value, as they stand in the text. (prometheus_client's own parser adds `_total`, too.)"""
    found: dict[str, dict[str, float]] = {}
    for line in metrics.exposition().decode().splitlines():
        if not line.startswith("#"):
            sample = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert sample is not None, line
            found.setdefault(sample[1], {})[sample[2] or ""] = float(sample[3])
    return found


def test_everything_that_is_exposed_is_declared_and_the_reverse() -> None:
    metrics = Metrics()
    metrics.registry.register(GpuCollector(management_library(), {0: "GPU-0"}))
    on_gpu = DeviceStats(1, 2, 3, 4, 5, 0.5, 6, 7, 8)
    metrics.observer("de", "de", "1")(step(finished=(Finished(Outcome.OK, 0.01, 0.03, 0.2, 7, 9),), device=on_gpu))
    metrics.slots.labels("de").set(8)
    metrics.calls.labels("m", "OK").inc()
    metrics.call_seconds.labels("m").observe(1)
    metrics.refused.labels("invalid").inc()
    metrics.loads.labels("loaded").inc()
    parts = {
        "counter": ("", "_created"),
        "gauge": ("",),
        "histogram": ("_bucket", "_sum", "_count", "_created"),
    }
    declared = {
        one.name.removesuffix("_total") + part if part == "_created" else one.name + part
        for one in metrics.declared
        for part in parts[one.kind]
    }
    names = set(exposed(metrics))
    assert names <= declared
    assert {one.name if one.kind != "histogram" else f"{one.name}_count" for one in metrics.declared} <= names


def test_counters_of_a_gpu_grow_by_what_happened_since() -> None:
    metrics = Metrics()
    observe = metrics.observer("de", "de", "1")
    for stats in (DeviceStats(10, 20, 30, 4, 2, 0.25, 6, 100, 4), None, DeviceStats(11, 20, 29, 9, 7, 1.5, 16, 300, 9)):
        observe(step(device=stats))
    assert metrics.registry.get_sample_value("beamline_gpu_steps_total", {"model": "de"}) == 9
    assert metrics.registry.get_sample_value("beamline_gpu_graph_replays_total", {"model": "de"}) == 7
    assert metrics.registry.get_sample_value("beamline_gpu_step_seconds_total", {"model": "de"}) == 1.5
    assert metrics.registry.get_sample_value("beamline_gpu_used_bytes", {"model": "de"}) == 11


# As Triton's documentation has them.
TRITON = {
    "nv_inference_request_success": "counter",
    "nv_inference_request_failure": "counter",
    "nv_inference_count": "counter",
    "nv_inference_exec_count": "counter",
    "nv_inference_request_duration_us": "counter",
    "nv_inference_queue_duration_us": "counter",
    "nv_inference_compute_input_duration_us": "counter",
    "nv_inference_compute_infer_duration_us": "counter",
    "nv_inference_compute_output_duration_us": "counter",
    "nv_inference_pending_request_count": "gauge",
}


def test_tritons_names_and_labels_are_exact() -> None:
    metrics = Metrics()
    observe = metrics.observer("de/7", 'a "b"\\', "7")
    finished = (
        Finished(Outcome.OK, 0.25, 0.5, 1.0, 7, 9, encode_seconds=0.125),
        Finished(Outcome.CANCELLED, 0.5, None, 0.5, 5, 0),
    )
    observe(step(finished=finished, queued=3, step_seconds=0.5, encode_seconds=0.125, decode_seconds=0.25))
    observe(step(queued=2, active=0, beam_width=0, step_seconds=0.0, encode_seconds=0.0, decode_seconds=0.0))
    metrics.triton.call('a "b"\\', "7", 1.5, answered=True)
    metrics.triton.call('a "b"\\', "7", 9.0, answered=False)
    metrics.triton.host_worked('a "b"\\', "7", reading=0.125, writing=0.25)
    text = metrics.exposition().decode()
    for name, kind in TRITON.items():
        assert f"# TYPE {name} {kind}\n" in text
    values = {name: found for name, found in exposed(metrics).items() if name.startswith("nv_")}
    assert set(values) == set(TRITON)
    assert {name: dict(found) for name, found in values.items()} == {
        name: {r'model="a \"b\"\\",version="7"': value}
        for name, value in {
            "nv_inference_request_success": 1,
            "nv_inference_request_failure": 1,
            "nv_inference_count": 1,
            "nv_inference_exec_count": 1,
            "nv_inference_request_duration_us": 1_500_000,
            "nv_inference_queue_duration_us": 750_000,
            "nv_inference_compute_input_duration_us": 125_000,
            "nv_inference_compute_infer_duration_us": 750_000,
            "nv_inference_compute_output_duration_us": 250_000,
            "nv_inference_pending_request_count": 2,
        }.items()
    }
