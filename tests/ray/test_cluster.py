"""The application on a real Ray, in an environment and a network of its own: what is in `inside/`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ray.environment import POSSIBLE, run_inside
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from tests.support.language_models import ConvertedLanguageModel

pytestmark = [pytest.mark.full, pytest.mark.skipif(not POSSIBLE, reason="needs unshare, as root")]


def check(file: str, **variables: str) -> None:
    options = ("-q", "--disable-warnings", "-p", "no:cacheprovider")
    done = run_inside("-m", "pytest", *options, f"tests/ray/inside/{file}", variables=variables)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def repository(
    tmp_path_factory: pytest.TempPathFactory, pooled_repository: Path, language_model: ConvertedLanguageModel
) -> Path:
    """Three models: `en-de`, the shipped one, `mood`, which classifies, and `llama3-grouped`."""
    folder = tmp_path_factory.mktemp("three")
    for model in (ROOT / "model_repo" / "en-de", pooled_repository / "mood", language_model.folder.parent):
        shutil.copytree(model, folder / model.name)
    return folder


def test_what_a_cluster_of_two_replicas_promises() -> None:
    check("faults.py")


def test_every_call_is_answered_as_by_a_server(repository: Path) -> None:
    check("calls.py", BEAMLINE_TEST_REPOSITORY=str(repository))


def test_models_are_loaded_as_they_are_asked_for(repository: Path) -> None:
    check("on_demand.py", BEAMLINE_TEST_REPOSITORY=str(repository))


def test_replicas_come_and_go_with_the_load() -> None:
    check("autoscaling.py")
