"""Three models, of which a replica holds one or two: loaded as they are asked for, the least recently used leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.inside.asking import Answer, Call, ask, http_ask
from tests.ray.inside.calls import CALLS, LANGUAGE, REPOSITORY, ROUTES, kserve
from tests.ray.inside.cluster import GRPC, HTTP, cluster, deploy, instances, metrics
from tests.support.processes import ServerProcess, eventually, serving

OF_MODEL = {"en-de": CALLS["Translate"], "mood": CALLS["Classify"], LANGUAGE: CALLS["Generate"]}


@pytest.fixture(scope="module", autouse=True)
def proxies() -> Iterator[None]:
    with cluster("services_by_model"):
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    """From a server that has all three."""
    with serving(tmp_path_factory.mktemp("server") / "log.txt", "--repo", str(REPOSITORY)) as server:
        yield _answers(server)


def _answers(server: ServerProcess) -> dict[str, Answer]:
    calls: dict[str, Call] = {**OF_MODEL, "infer": CALLS["ModelInfer"], "stream": CALLS["ModelStreamInfer"]}
    return {name: ask(server.grpc, call) for name, call in calls.items()}


def loaded() -> set[str]:
    [found] = ask(GRPC, kserve("RepositoryIndex")).messages
    return {each["name"] for each in found["models"] if each.get("state") == "READY"}


def test_the_least_recently_used_leaves(expected: dict[str, Answer]) -> None:
    deploy({"repo": str(REPOSITORY), "models_per_replica": 2}, num_replicas=1)
    assert loaded() == set()
    assert ask(GRPC, kserve("ServerReady")).messages == ({"ready": True},)
    for name, call in OF_MODEL.items():
        assert ask(GRPC, call) == expected[name]
        assert name in loaded()
    assert loaded() == {"mood", LANGUAGE}
    assert ask(GRPC, CALLS["ModelInfer"]) == expected["infer"]  # en-de
    assert loaded() == {LANGUAGE, "en-de"}
    assert ask(GRPC, CALLS["ModelStreamInfer"]) == expected["stream"]  # mood
    assert loaded() == {"en-de", "mood"}
    assert http_ask(HTTP, *ROUTES["generate"])[0] == 200
    assert loaded() == {"mood", LANGUAGE}


def test_a_name_that_is_none_pushes_nothing_out() -> None:
    before = loaded()
    for _ in range(3):
        assert ask(GRPC, CALLS["no such model"]).code == "NOT_FOUND"
    assert loaded() == before


def test_a_call_goes_to_a_replica_that_has_its_model(expected: dict[str, Answer]) -> None:
    """Each of two replicas has room for one: if calls of two models went to either, models would be loaded all the
    time."""
    deploy({"repo": str(REPOSITORY), "models_per_replica": 1}, num_replicas=2)
    eventually(lambda: len(instances(metrics())) == 2, "both replicas have reported")
    names = ("en-de", "mood")
    settling, steady = 3 * names, 20 * names
    for name in settling:  # until each has found its place
        assert ask(GRPC, OF_MODEL[name]) == expected[name]
    before = loads(len(settling))
    for name in steady:
        assert ask(GRPC, OF_MODEL[name]) == expected[name]
    after = loads(len(settling) + len(steady))
    print(f"{before:.0f} loads for {len(settling)} calls, then {after - before:.0f} for {len(steady)}")
    assert after - before <= 2


def loads(calls: int) -> float:
    """When the replicas have reported so many calls that succeeded."""

    def reported() -> bool:
        found = metrics()
        names = ("Translate", "Classify")
        return sum(found("beamline_calls_total", method=f"/beamline.v1.Inference/{name}") for name in names) >= calls

    eventually(reported, f"{calls} calls")
    return metrics()("beamline_model_loads_total", outcome="loaded")
