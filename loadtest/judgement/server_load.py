"""How busy the server was by its own metrics: queue, slots and steps, over time and in the mean."""

from __future__ import annotations

from beamline.loadtest.report.document import ServerSample, ServerTimes
from beamline.loadtest.targets.server_metrics import Reading


def server_samples(readings: list[Reading], start: float) -> tuple[ServerSample, ...]:
    samples = []
    before: dict[str, tuple[float, float]] = {}
    for reading in readings:
        for model, now in reading.models.items():
            total, count = before.get(model, (now.occupancy_sum, now.occupancy_count))
            steps = now.occupancy_count - count
            samples.append(
                ServerSample(
                    at=reading.at - start,
                    model=model,
                    queue_length=now.queue_length,
                    active_slots=now.active_slots,
                    slots=now.slots,
                    occupancy=(now.occupancy_sum - total) / steps if steps > 0 else None,
                )
            )
            before[model] = (now.occupancy_sum, now.occupancy_count)
    return tuple(samples)


def server_times(readings: list[Reading]) -> tuple[ServerTimes, ...]:
    if not readings:
        return ()
    found = []
    for model, last in readings[-1].models.items():
        first = readings[0].models.get(model, last)
        steps = last.step_seconds_count - first.step_seconds_count
        decoding = last.occupancy_count - first.occupancy_count
        found.append(
            ServerTimes(
                model=model,
                steps=int(steps),
                mean_step_seconds=(last.step_seconds_sum - first.step_seconds_sum) / steps if steps > 0 else None,
                mean_occupancy=(last.occupancy_sum - first.occupancy_sum) / decoding if decoding > 0 else None,
            )
        )
    return tuple(found)
