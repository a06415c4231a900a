"""The rules and the dashboards, read by Prometheus itself. Debian's package `prometheus` has it, and promtool."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from beamline import Client
from beamline.errors import BeamlineError
from beamline.serving.telemetry.metrics import Metrics
from tests.container.test_dashboards import DASHBOARDS, known_metrics, metrics_in, queries
from tests.support.envoy import free_ports
from tests.support.processes import PATIENCE, ROOT, eventually, serving

RULES = ROOT / "container" / "prometheus-rules.yml"
UNIT_TESTS = Path(__file__).parent / "alerts.yml"


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: apt-get install prometheus")
    return found


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_rules_ask_for_what_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = known_metrics(Metrics())
    for rule in rules():
        for name in metrics_in(rule["expr"]):
            assert name in known or name in recorded or name == "up", f"{name} in {rule}"
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    for rule in rules():
        assert rule.get("alert", rule.get("record", "")) in page


def test_every_alert_has_a_unit_test_that_raises_it() -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == alerts


def test_promtool_accepts_the_rules_and_their_tests(tmp_path: Path) -> None:
    promtool = program("promtool")
    tests = tmp_path / "alerts.yml"
    tests.write_text(UNIT_TESTS.read_text().replace("[RULES]", f"[{RULES}]"))
    for command in (("check", "rules", str(RULES)), ("test", "rules", str(tests))):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "beamline", "static_configs": [{"targets": targets}]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    storage = f"--storage.tsdb.path={folder / 'data'}"
    command = [program("prometheus"), f"--config.file={file}", storage, f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield address
        finally:
            process.terminate()


def ask(address: str, query: str) -> list[float]:
    """The values of all series, those aside that are no numbers."""
    asked = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{asked}", timeout=PATIENCE) as answer:
        found = [float(series["value"][1]) for series in json.load(answer)["data"]["result"]]
    return [value for value in found if not math.isnan(value)]


@pytest.mark.full
def test_every_query_of_the_dashboards_returns_data(tmp_path: Path) -> None:
    asked = {query for path in DASHBOARDS for query in queries(json.loads(path.read_text(encoding="utf-8")))}
    asked = {query for query in asked if not query.startswith("label_values")}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for text in ("$__rate_interval", "$model", "$job"):
        value = "1m" if "rate" in text else ".*"
        asked = {query.replace(text, value) for query in asked}
    assert len(asked) > 30
    with ExitStack() as stack:
        options = ("--fake", "--fake-step-ms", "1")
        servers = [stack.enter_context(serving(tmp_path / f"{number}.txt", *options)) for number in range(2)]
        address = stack.enter_context(prometheus(tmp_path, [server.metrics_address for server in servers]))

        missing: set[str] = set()

        def work() -> bool:
            """Some calls, a refusal among them. Whether every query has data by now."""
            for server in servers:
                with Client(server.grpc, retries=0) as client:
                    client.translate("abc", model="fake")
                    client.generate("abc", model="fake-lm")
                    with suppress(BeamlineError):
                        client.translate("", model="fake")
            time.sleep(0.5)  # between two scrapes
            missing.clear()
            with suppress(OSError):  # not up yet
                missing.update(query for query in {*asked, *recorded} if not ask(address, query))
                return not missing
            return False

        try:
            eventually(work, "every query returns data")
        finally:
            print("without data:", missing)
        up = ask(address, 'count(up{job=~".*"} == 1)')
    assert up == [2]
