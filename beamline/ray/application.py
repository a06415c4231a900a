"""The application, as Ray's configuration names it: `import_path: beamline.ray:app`."""

from __future__ import annotations

from typing import Any

from beamline.ray import replica
from beamline.ray.config import application

_SHUTDOWN_SECONDS = 30.0  # for calls that run when a replica ends


def app(args: dict[str, Any]) -> Any:
    """`args` are the options of `beamline serve`, with underscores: docs/ray.md."""
    read = application(args)
    config = read.config
    models: Any = replica.Models.options(
        # The engine's own queue refuses what is too much, with a hint when to try again. Behind Ray's limit, which is 5
        # by default, calls would wait where no slot can be filled with them.
        max_ongoing_requests=config.max_slots + config.max_queue,
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        health_check_period_s=5.0,
    )
    page: Any = replica.MetricsPage
    return models.bind(read, page.bind())
