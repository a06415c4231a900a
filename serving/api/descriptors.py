"""How the file descriptors of the process are shared between its ports.

Each connection takes one. Where there are none left, nothing can be accepted or opened any more; so every port has a
number of its own, the health checks' among them, and some are kept for the files of models that are loaded.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

_KEPT = 64  # for files, and connections that are being refused
_ENOUGH = 65_536
_MOST_FOR_OPERATORS = 256
_FEWEST = 8  # of each port, however low the limit is


@dataclass(frozen=True, slots=True)
class Connections:
    """How many each port may have."""

    grpc: int
    gateway: int
    operators: int  # metrics and health


def share_descriptors(maximum: int | None = None) -> Connections:
    """Raises the soft limit as far as the process may. `maximum` is the operator's, for gRPC and for the gateway."""
    free = _limit() - _in_use() - _KEPT
    operators = max(_FEWEST, min(_MOST_FOR_OPERATORS, free // 8))
    each = max(_FEWEST, (free - operators) // 2)
    if maximum is not None:
        each = min(each, maximum)
    return Connections(each, each, operators)


def _limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else min(soft, _ENOUGH)


def _in_use() -> int:
    return len(os.listdir("/proc/self/fd"))
