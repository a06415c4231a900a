"""A Ray cluster on this machine, and the application on it. Only ever used inside Ray's own environment."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.support.processes import Metrics, eventually

APPLICATION = "beamline"
GRPC = "127.0.0.1:9000"  # nobody else is in this network
HTTP = "127.0.0.1:8000"
_OBJECTS_BYTES = 80 * 2**20  # the least that Ray allows, nearly; nothing of ours goes there
_CPUS = 8  # as Ray counts them: more than there are, so that a rolling update has room


@contextmanager
def cluster(services: str = "services") -> Iterator[None]:
    ray.init(
        num_cpus=_CPUS,
        object_store_memory=_OBJECTS_BYTES,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=int(HTTP.rpartition(":")[2])),
            grpc_options=gRPCOptions(
                port=int(GRPC.rpartition(":")[2]), grpc_servicer_functions=[f"beamline.ray:{services}"]
            ),
        )
        yield
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(args: dict[str, Any], **options: Any) -> None:
    """As `serve run` does with a file of this content. `options`: of the deployment with the models."""
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "beamline.ray:app",
        "args": args,
        "deployments": [{"name": "Models", **options}],
    }
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}), _blocking=False)
    eventually(lambda: status() == "DEPLOYING", "the application is deployed")
    eventually(lambda: status() == "RUNNING", "the application runs")


def status() -> str:
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return "MISSING"
    assert found.status.value not in ("DEPLOY_FAILED", "UNHEALTHY"), found.message
    return str(found.status.value)


def replicas() -> int:
    """That answer calls."""
    deployment = serve.status().applications[APPLICATION].deployments["Models"]
    return int(deployment.replica_states.get("RUNNING", 0))


def replica_processes() -> list[int]:
    """The process ids of the replicas with models, oldest first."""
    ours = f"ray::ServeReplica:{APPLICATION}:Models"
    here = os.readlink("/proc/self/ns/net")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.joinpath("cmdline").read_text().startswith(ours) and os.readlink(folder / "ns/net") == here:
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def metrics() -> Metrics:
    with urllib.request.urlopen(f"http://{HTTP}/metrics", timeout=60) as answer:
        content = answer.read().decode()
    return Metrics(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(content)
            for sample in family.samples
        }
    )


def instances(found: Metrics) -> set[str]:
    return {dict(labels)["instance"] for _, labels in found.samples}
