"""What a request that will not go on is answered, and counted as."""

from __future__ import annotations

from collections.abc import Callable

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.scheduler import Reason
from beamline.serving.errors import Cancelled, DeadlinePassed, Overloaded

DROPPED: dict[Reason, tuple[Callable[[], Exception], Outcome]] = {
    Reason.CANCELLED: (lambda: Cancelled("cancelled by the client"), Outcome.CANCELLED),
    Reason.DEADLINE: (lambda: DeadlinePassed("the deadline is over"), Outcome.DEADLINE),
    Reason.QUEUE_TIMEOUT: (
        lambda: Overloaded("no slot was free within the call's queue timeout; try again later, or allow more"),
        Outcome.QUEUE_TIMEOUT,
    ),
}
