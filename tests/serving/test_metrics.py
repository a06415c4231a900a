from __future__ import annotations

from serving.engine.stats import Finished, Outcome, StepStats
from serving.metrics import Metrics


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
    metrics.observer("de")(step())
    expected = {
        "slots": 8,
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
    metrics.observer("de")(step(active=0, beam_width=0, admitted=0, live_entries=0, queued=0))
    assert value(metrics, "batch_occupancy_count") == 0
    assert value(metrics, "encode_seconds_count") == 0


def test_the_last_step_leaves_no_slot_active() -> None:
    metrics = Metrics()
    metrics.observer("de")(step(active=1, remaining=0))
    assert value(metrics, "active_slots") == 0


def test_finished_requests_are_counted_by_outcome() -> None:
    metrics = Metrics()
    done = Finished(Outcome.OK, 0.01, 0.03, 0.2, source_tokens=7, target_tokens=9)
    gone = Finished(Outcome.CANCELLED, 0.02, None, 0.1, source_tokens=5, target_tokens=0)
    metrics.observer("de")(step(finished=(done, gone)))
    assert value(metrics, "requests_total", outcome="ok") == 1
    assert value(metrics, "requests_total", outcome="cancelled") == 1
    assert value(metrics, "requests_total", outcome="failed") == 0
    assert value(metrics, "queue_seconds_count") == 2
    assert value(metrics, "first_token_seconds_count") == 1
    assert value(metrics, "source_tokens_total") == 12
    assert value(metrics, "target_tokens_total") == 9


def test_models_are_apart_and_registries_too() -> None:
    first, second = Metrics(), Metrics()
    first.observer("de")(step())
    first.observer("fr")
    assert value(first, "step_seconds_count") == 1
    assert first.registry.get_sample_value("beamline_step_seconds_count", {"model": "fr"}) == 0
    assert value(second, "step_seconds_count") is None
    assert b"beamline_build_info{" in second.exposition()
