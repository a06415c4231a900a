"""The OpenAPI description, tried by a tool that makes requests from it: right ones, and ones that break each bound."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.environments import python_of
from tests.support.processes import PATIENCE, serving

# A request that keeps to the schema may still be wrong: what a model can do, and what one field means for another,
# no schema says. All other checks are on; that what breaks the schema is refused is among them.
EXCLUDED = "positive_data_acceptance"
# Who gives a call one millisecond gets 504, which is no failure of the server.
# What breaks the schema may be too large as well, which is said first (413, which is not expected of itself).
# And anybody may send further headers; proxies do.
CONFIGURATION = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
[checks.negative_data_rejection]
expected-statuses = [
    "400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx",
]
[generation]
allow-extra-parameters = false
"""


@pytest.mark.full
def test_no_request_is_answered_otherwise_than_described(tmp_path: Path) -> None:
    try:
        schemathesis = python_of("schemathesis").parent / "schemathesis"
    except subprocess.CalledProcessError:
        pytest.skip("schemathesis can't be installed here")
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    with serving(tmp_path / "log.txt", "--fake") as server:
        checks = ["-c", "all", "--exclude-checks", EXCLUDED, "--phases", "examples,coverage,fuzzing"]
        command = [str(schemathesis), "run", f"http://{server.http}/openapi.json", *checks, "--max-examples", "50"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "31 selected / 31 total" in ended.stdout
    assert "Traceback" not in (tmp_path / "log.txt").read_text()
