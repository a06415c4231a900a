"""The Grafana dashboards and the compose file ask only for what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beamline.serving.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "container" / "grafana" / "dashboards").glob("*.json"))
SCRAPED = {"job", "instance"}  # labels that every series has from Prometheus


def queries(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)
    elif isinstance(found, list):
        for each in found:
            yield from queries(each)


def known_metrics(metrics: Metrics) -> dict[str, set[str]]:
    """By name, with their labels."""
    known: dict[str, set[str]] = {"up": set()}
    for one in metrics.declared:
        if one.kind == "histogram":
            known[f"{one.name}_bucket"] = {*one.labels, "le"}
            known[f"{one.name}_sum"] = known[f"{one.name}_count"] = set(one.labels)
        else:
            known[one.name] = set(one.labels)
    return known


def metrics_in(query: str) -> list[str]:
    """Those of servers, those that rules record, and `up`."""
    return re.findall(r"\b(?:\w+:)?(?:beamline|nv)_\w+(?::\w+)?|\bup(?=\{)", query)


def recorded_metrics() -> dict[str, set[str]]:
    """By name, with the labels that their names begin with."""
    rules = (ROOT / "container" / "prometheus-rules.yml").read_text(encoding="utf-8")
    names = re.findall(r"record: (\S+)", rules)
    return {name: set(name.partition(":")[0].split("_")) for name in names}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_metric_of_a_dashboard_exists_with_its_labels(path: Path) -> None:
    known = known_metrics(Metrics()) | recorded_metrics()
    asked = list(queries(json.loads(path.read_text(encoding="utf-8"))))
    assert len(asked) > 15
    for query in asked:
        names = metrics_in(query)
        assert names, query
        for name in names:
            assert name in known, f"{name} in {query}"
        labels = set(re.findall(r"(\w+)=~?\"", query))
        for group in re.findall(r"by \(([\w, ]+)\)", query):
            labels |= set(group.split(", "))
        for label in labels - SCRAPED:
            assert all(label in known[name] for name in names), f"{label} in {query}"


def test_the_compose_file_names_files_that_exist() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    mounted = re.findall(r"- (\./\S+?):/", compose)
    assert len(mounted) == 4
    for path in mounted:
        assert (ROOT / path).exists(), path
