"""The Grafana dashboard and the compose file ask only for what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beamline.serving.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "container" / "grafana" / "dashboards" / "beamline.json"


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


def test_every_metric_of_the_dashboard_exists_with_its_labels() -> None:
    known: dict[str, set[str]] = {}
    for one in Metrics().declared:
        if one.kind == "histogram":
            known[f"{one.name}_bucket"] = {*one.labels, "le"}
            known[f"{one.name}_sum"] = known[f"{one.name}_count"] = set(one.labels)
        else:
            known[one.name] = set(one.labels)
    asked = list(queries(json.loads(DASHBOARD.read_text(encoding="utf-8"))))
    assert len(asked) > 15
    for query in asked:
        names = re.findall(r"\b(?:beamline|nv)_\w+", query)
        assert names, query
        for name in names:
            assert name in known, f"{name} in {query}"
        labels = set(re.findall(r"(\w+)=~?\"", query))
        for group in re.findall(r"by \(([\w, ]+)\)", query):
            labels |= set(group.split(", "))
        for label in labels:
            assert all(label in known[name] for name in names), f"{label} in {query}"


def test_the_compose_file_names_files_that_exist() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    mounted = re.findall(r"- (\./\S+?):/", compose)
    assert len(mounted) == 3
    for path in mounted:
        assert (ROOT / path).exists(), path
