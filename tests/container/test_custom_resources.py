"""Resources that Kubernetes itself has no schema of, by what their own projects publish."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.benchmarks.environments import python_of
from tests.container.test_chart import KSERVE, SWITCHES, named, rendered
from tests.support.processes import ROOT

pytestmark = pytest.mark.full

PACKAGES = ("@kubernetes-models/keda@2.0.0", "@kubernetes-models/prometheus-operator@6.0.0")
KINDS = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}
# Validates one resource, which comes on standard input; what is wrong goes to standard error.
_VALIDATE = """
import {{ {kind} }} from "{package}";
import {{ readFileSync }} from "node:fs";
const resource = new {kind}(JSON.parse(readFileSync(0, "utf8")));
try {{ resource.validate(); }} catch (error) {{ console.error(error.message); process.exit(1); }}
"""


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with what npm has of them."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not here: apt-get install npm")
    folder = ROOT / ".cache" / "kubernetes-models"
    ready = folder / "ready.txt"
    if not ready.is_file() or ready.read_text() != "\n".join(PACKAGES):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"type": "module"}')
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
        if subprocess.run(command, cwd=folder, check=False).returncode:
            pytest.skip("npm can't install @kubernetes-models here")
        ready.write_text("\n".join(PACKAGES))
    return folder


def validated(folder: Path, resource: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    kind = resource["kind"]
    file = folder / f"{kind}.mjs"
    file.write_text(_VALIDATE.format(kind=kind, package=KINDS[kind]))
    return subprocess.run(
        ["node", str(file)], cwd=folder, input=json.dumps(resource), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kind", KINDS)
def test_their_owners_accept_what_the_chart_makes(packages: Path, kind: str) -> None:
    resource = named(kind, rendered(f"{SWITCHES['monitored']},keda.enabled=true"))
    done = validated(packages, resource)
    assert done.returncode == 0, done.stderr
    broken = {**resource, "spec": {**resource["spec"]}}
    needed = {"ScaledObject": "triggers", "ServiceMonitor": "selector", "PrometheusRule": "groups"}[kind]
    broken["spec"][needed] = "nonsense"
    assert validated(packages, broken).returncode == 1, "it refuses nothing"


def kserve(file: Path) -> subprocess.CompletedProcess[str]:
    try:
        python = python_of("kserve")
    except subprocess.CalledProcessError:
        pytest.skip("KServe's models can't be installed here: pip install kserve")
    script = Path(__file__).with_name("kserve_models.py")
    return subprocess.run([str(python), str(script), str(file)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["runtime", "service", "service-grpc"])
def test_kserve_knows_every_field(name: str, tmp_path: Path) -> None:
    done = kserve(KSERVE / f"{name}.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("serving.kserve.io V1")
    broken = yaml.safe_load((KSERVE / f"{name}.yaml").read_text())
    broken["spec"]["nonsense"] = 1
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump(broken))
    assert "has nonsense" in kserve(file).stderr
