"""The load tester's own health: whether it was the bottleneck, so that latencies are partly its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.load.worker_messages import WorkerHealth
from beamline.loadtest.quantities import format_duration, format_share
from beamline.loadtest.report.document import ClientHealth

_WORKER_LIMIT = 0.9  # of a core: beyond it, sending waits for computing
_LAG_LIMIT = 0.002  # seconds; lateness that would show in a fast server's p99 ...
_LAG_SHARE = 0.05  # ... but not in a slow one's
_MACHINE_LIMIT, _OWN_LIMIT = 0.95, 0.2  # of all cores: in use, and by us. A server beside us then waits for us
_FEWEST_LATE = 5  # requests; one or two are late on any machine that has something else to do, too


def judge_client(
    workers: Sequence[WorkerHealth],
    send_lags: NDArray[np.float64],
    latencies: NDArray[np.float64],
    machine_busy: float | None,
) -> ClientHealth:
    """`send_lags`: actual less intended send times; empty for a closed loop, which has no intended times. A
    percentile of them is compared with the same percentile of the latencies, which it would distort."""
    used = [each.cpu_seconds / max(each.wall_seconds, 1e-9) for each in workers]
    busiest, own = max(used, default=0.0), sum(used) / (os.cpu_count() or 1)
    loop_lags = np.concatenate([each.loop_lags for each in workers]) if workers else np.empty(0)
    send_p99, loop_p99 = _percentile(send_lags, 0.99), _percentile(loop_lags, 0.99)
    reasons = []
    if busiest > _WORKER_LIMIT:
        reasons.append(f"a worker process used {format_share(busiest)} of a core; try more --workers or a lower rate")
    crowded = machine_busy is not None and machine_busy > _MACHINE_LIMIT and own > _OWN_LIMIT
    if machine_busy is not None and crowded:
        reasons.append(
            f"this machine's cores were {format_share(machine_busy)} busy, {format_share(own)} with this tool; "
            "a server on it waits for them"
        )
    for share, lag in _late(send_lags, 0.5, 0.99).items():
        if lag > _limit(latencies, share):
            reasons.append(f"{format_share(1 - share)} of the requests were sent {format_duration(lag)} late or later")
    for share, lag in _late(loop_lags, 0.99).items():
        if lag > _limit(latencies, share):
            reasons.append(
                f"the event loop was {format_duration(lag)} late or later {format_share(1 - share)} of the time"
            )
    return ClientHealth(
        saturated=bool(reasons),
        reasons=tuple(reasons),
        send_lag_p50=_percentile(send_lags, 0.5),
        send_lag_p99=send_p99,
        send_lag_max=float(send_lags.max()) if len(send_lags) else None,
        loop_lag_p99=loop_p99,
        busiest_worker=busiest,
        machine_busy=machine_busy,
        crowded=crowded,
    )


def _late(lags: NDArray[np.float64], *shares: float) -> dict[float, float]:
    """The lag at each percentile, or at the highest below it that enough of them exceed; nothing if that is not even
    half of them."""
    highest = 1 - _FEWEST_LATE / max(len(lags), 1)
    found = {share: _percentile(lags, share) for share in (min(share, highest) for share in shares) if share >= 0.5}
    return {share: lag for share, lag in found.items() if lag is not None}


def _limit(latencies: NDArray[np.float64], share: float) -> float:
    return max(_LAG_LIMIT, _LAG_SHARE * (_percentile(latencies, share) or 0.0))


class MachineLoad:
    """The share of all cores that was in use, since it was made. None where there is no /proc/stat."""

    def __init__(self) -> None:
        self._began = _cpu_ticks()

    def busy(self) -> float | None:
        began, now = self._began, _cpu_ticks()
        if began is None or now is None or now[1] <= began[1]:
            return None
        return 1 - (now[0] - began[0]) / (now[1] - began[1])


def _cpu_ticks() -> tuple[int, int] | None:
    """Idle ticks, and all of them."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return fields[3] + fields[4], sum(fields)


def _percentile(values: NDArray[np.float64], share: float) -> float | None:
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else None
