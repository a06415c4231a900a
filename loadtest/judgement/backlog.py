"""Whether the server fell behind during a stage."""

from __future__ import annotations

from collections.abc import Sequence

from beamline.loadtest.report.document import TimeBin

_BACKLOG = 0.1  # of the requests; a queue that grows by more of them is not the effect of one slow moment
_BY_CHANCE = 4.0  # standard deviations of what is in flight
_FEWEST_BINS = 4


def backlog_grew(bins: Sequence[TimeBin], begin: float, end: float) -> bool:
    """Whether the number of requests in flight grew in the first half of the measured time, and in the second by more
    than chance explains. Requests that are in flight at the end of any run are no backlog."""
    measured = [each for each in bins if each.start + each.seconds > begin and each.start < end]
    if len(measured) < _FEWEST_BINS:
        return False
    middle = len(measured) // 2
    first, half, last = (measured[index].in_flight for index in (0, middle - 1, -1))
    growth = last - half
    sent = sum(each.sent for each in measured[middle:])
    return first < half and growth > max(_BACKLOG * sent, _BY_CHANCE * (half + 1) ** 0.5)
