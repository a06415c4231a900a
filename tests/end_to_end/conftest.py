"""A real server process over a really converted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ServerProcess, serving


@pytest.fixture(scope="session")
def server(model_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Shared by all tests that leave it running; at the end it drains and exits with 0."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serving(log, "--repo", str(model_repository), "--threads", "1") as running:
        yield running
