"""One table of statuses for all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from beamline.serving.api.inference import METHODS, Inference
from beamline.serving.api.status import StatusCode, status_of
from beamline.serving.errors import BeamlineError, ComputeError, InvalidRequest, Overloaded, RequestError
from tests.support.import_graph import all_imports
from tests.test_imports import ROOT, within

API = ROOT / "serving" / "api"
REGISTRATION = "open_inference.registration"  # which puts the open inference methods behind gRPC
GRPC_SERVICES = (API / "grpc", API / f"{REGISTRATION.replace('.', '/')}.py")


def kinds(base: type[RequestError]) -> Iterator[type[RequestError]]:
    """All that a server raises: the client has some of its own, and what is private is only a base of others."""
    for kind in base.__subclasses__():
        if kind.__module__ == RequestError.__module__ and not kind.__name__.startswith("_"):
            yield kind
        yield from kinds(kind)


@pytest.mark.parametrize("kind", kinds(RequestError))
def test_every_error_of_a_request_has_a_status_that_shows_its_text(kind: type[RequestError]) -> None:
    status = status_of(kind("what was wrong"), "id")
    assert status.code not in (StatusCode.OK, StatusCode.INTERNAL)
    assert status.message == "what was wrong"


@pytest.mark.parametrize("error", [RuntimeError("secret"), BeamlineError("secret"), ComputeError("secret")])
def test_other_errors_show_only_the_request_id(error: Exception) -> None:
    status = status_of(error, "id-7")
    assert (status.code, status.refusal) == (StatusCode.INTERNAL, None)
    assert "secret" not in status.message
    assert "id-7" in status.message


def test_of_concurrent_failures_the_first_counts() -> None:
    group = ExceptionGroup("two", [ExceptionGroup("one", [Overloaded("full", retry_after=1.5)]), InvalidRequest("x")])
    status = status_of(group, "id")
    assert (status.code, status.message, status.retry_after) == (StatusCode.RESOURCE_EXHAUSTED, "full", 1.5)
    assert status.refusal == "overloaded"


def test_a_message_fits_into_a_header() -> None:
    assert len(status_of(InvalidRequest("x" * 5000), "id").message) == 1000


@pytest.mark.parametrize("code", StatusCode)
def test_every_code_is_one_of_grpcs(code: StatusCode) -> None:
    assert grpc.StatusCode[code.name].name == code.value


def test_every_method_of_the_service_is_there() -> None:
    assert all(hasattr(Inference, name) for name in METHODS)


def test_only_the_grpc_services_know_grpc() -> None:
    """Guard, methods and gateway would serve an API without gRPC, too."""

    def is_grpc_service(path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in GRPC_SERVICES)

    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in API.rglob("*.py")
        if not is_grpc_service(path)
        for line, name in all_imports(path, ROOT)
        if within(name, ("grpc", "beamline.serving.api.grpc", f"beamline.serving.api.{REGISTRATION}"))
    ]
    assert found == []
