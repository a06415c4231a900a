"""How many replicas the load needs: by the requests in the engines, decoded or waiting, for each of their slots.

Ray's own policy counts the calls under way, whatever they cost. A call may be a thousand sequences, or one; what fills
a replica are sequences in slots, and what is too much for it waits in its queue.

Ray sends this module to its controller by value, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

UTILIZATION = "utilization"  # of a replica's busiest model: requests for each slot, as an average over some seconds
SLOTS = "slots"  # of that model


class ByLoad:
    """For `policy` in Ray's `autoscaling_config`, which has the limits and the delays."""

    def __init__(self, target_utilization: float = 0.8) -> None:
        """`target_utilization`: what each replica should have; 1: every slot is taken, and nobody waits."""
        if not 0 < target_utilization <= 100:
            raise ValueError(f"target_utilization is {target_utilization}; it must be above 0, and at most 100")
        self._target = float(target_utilization)

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas, and a state to remember, of which there is none."""
        reported = context.aggregated_metrics or {}
        utilization: dict[Any, float] = reported.get(UTILIZATION, {})
        running = max(1, context.current_num_replicas)
        if not utilization:  # none has reported yet
            return float(context.target_num_replicas), {}
        # A replica that has just come has not reported, and is taken to be as busy as the others.
        total = sum(utilization.values()) * running / len(utilization)
        slots = max(reported.get(SLOTS, {}).values(), default=0.0)
        if slots:
            total += context.total_queued_requests / slots  # calls that wait in proxies, for want of a replica
        return total / self._target, {}
