"""What is opened late and can't be opened is not tried again for every request."""

from __future__ import annotations

import pytest

from beamline.serving.backends.late_graphs import LateGraphs
from beamline.serving.errors import ComputeError, OutOfMemory


def test_a_refusal_is_repeated_for_a_minute() -> None:
    clock, tries = [0.0], list[float]()
    late = LateGraphs(lambda: clock[0])

    def open_score(error: Exception | None) -> None:
        with late.opening("score"):
            tries.append(clock[0])
            if error is not None:
                raise error

    for clock[0] in (0.0, 1.0, 2.0, 60.0):
        with pytest.raises(OutOfMemory, match="2 MiB are missing"):
            open_score(OutOfMemory("2 MiB are missing"))
    with late.opening("another"):
        pass
    clock[0] = 61.5
    with pytest.raises(ComputeError):  # which may pass
        open_score(ComputeError("a call of CUDA's failed"))
    open_score(None)
    assert tries == [0.0, 1.0, 61.5, 61.5]
