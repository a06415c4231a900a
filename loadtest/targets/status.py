"""Status codes of a request: gRPC's own, and one for a request that had no answer when the run was stopped."""

from __future__ import annotations

import grpc

OK = grpc.StatusCode.OK.value[0]
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
UNFINISHED = 255  # none of gRPC's
STATUS_NAMES = {**{code.value[0]: code.name for code in grpc.StatusCode}, UNFINISHED: "UNFINISHED"}
