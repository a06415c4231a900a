"""Every call through Ray's proxies is answered as by a server of our own: messages, statuses, sentences, routes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.inference import METHODS
from tests.ray.inside.asking import Call, ask, http_ask, lasting
from tests.ray.inside.cluster import GRPC, HTTP, cluster, deploy
from tests.support.processes import ServerProcess, run_beamline, serving

REPOSITORY = Path(os.environ["BEAMLINE_TEST_REPOSITORY"])  # en-de, mood (a classifier), llama3-grouped
LANGUAGE = "llama3-grouped"
TEXT = "Save the file."
BEAMS = pb.DecodingOptions(beam_size=4, num_hypotheses=2, return_scores=True, return_tokens=True, return_alignment=True)
SAMPLES = pb.GenerationOptions(max_tokens=12, n=2, temperature=0.9, seed=7, return_log_probs=True)
OPEN = "/inference.GRPCInferenceService"


def ours(name: str, request: object) -> Call:
    method = METHODS[name]
    return Call(f"/beamline.v1.Inference/{name}", request, method.response, method.streams)  # type: ignore[arg-type]


def kserve(name: str, /, **fields: object) -> Call:
    method = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
    request = getattr(oip, method.input_type.name)(**fields)
    return Call(f"{OPEN}/{name}", request, GetMessageClass(method.output_type), asks=method.client_streaming)


def infer(model: str, **fields: object) -> dict[str, object]:
    text = oip.ModelInferRequest.InferInputTensor(
        name="text",
        datatype="BYTES",
        shape=[1],
        contents=oip.InferTensorContents(bytes_contents=[TEXT.encode()]),
    )
    return {"model_name": model, "inputs": [text], **fields}


def inputs(*texts: str) -> list[pb.Input]:
    return [pb.Input(text=each) for each in texts]


CALLS = {
    "Translate": ours("Translate", pb.TranslateRequest(model="en-de", inputs=inputs(TEXT, "Open it."), options=BEAMS)),
    "TranslateStream": ours("TranslateStream", pb.TranslateRequest(model="en-de", inputs=inputs(TEXT))),
    "Generate": ours("Generate", pb.GenerateRequest(model=LANGUAGE, text="the", options=SAMPLES)),
    "GenerateOnce": ours("GenerateOnce", pb.GenerateRequest(model=LANGUAGE, text="the", options=SAMPLES)),
    "Score": ours(
        "Score", pb.ScoreRequest(model="en-de", sources=inputs(TEXT), texts=inputs("Speichern Sie die Datei."))
    ),
    "Classify": ours("Classify", pb.ClassifyRequest(model="mood", inputs=inputs("What a day.", "No."))),
    "Embed": ours("Embed", pb.EmbedRequest(model="mood", inputs=inputs("What a day."), normalize=True)),
    # Refusals, with the sentence that says what is allowed.
    "a wrong value": ours(
        "Translate",
        pb.TranslateRequest(model="en-de", inputs=inputs(TEXT), options=pb.DecodingOptions(beam_size=999)),
    ),
    "a wrong value of a stream": ours(
        "Generate", pb.GenerateRequest(model=LANGUAGE, text="the", options=pb.GenerationOptions(top_p=7))
    ),
    "no such model": ours("Translate", pb.TranslateRequest(model="none", inputs=inputs(TEXT))),
    "a model that can't": ours("Classify", pb.ClassifyRequest(model="en-de", inputs=inputs(TEXT))),
    "which model": ours("Generate", pb.GenerateRequest(model="en-de", text="the")),
    # The open inference protocol.
    "ServerLive": kserve("ServerLive"),
    "ServerReady": kserve("ServerReady"),
    "ServerMetadata": kserve("ServerMetadata"),
    "ModelReady": kserve("ModelReady", name="mood"),
    "ModelMetadata": kserve("ModelMetadata", name="en-de"),
    "ModelConfig": kserve("ModelConfig", name="en-de"),
    "RepositoryIndex": kserve("RepositoryIndex"),
    "ModelInfer": kserve("ModelInfer", **infer("en-de", id="7")),
    "ModelInfer, a classifier": kserve("ModelInfer", **infer("mood")),
    "ModelStreamInfer": kserve("ModelStreamInfer", **infer("mood", id="8")),
    "ModelInfer, no such model": kserve("ModelInfer", **infer("none")),
    "ModelInfer, no such input": kserve("ModelInfer", model_name="en-de"),
    # Health.
    "health": Call(
        "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service="mood"), health_pb2.HealthCheckResponse
    ),
    "health of none": Call(
        "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service="none"), health_pb2.HealthCheckResponse
    ),
}
TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
STREAM = {"accept": "text/event-stream"}
ROUTES: dict[str, tuple[str, dict[str, object] | None, dict[str, str]]] = {
    "translate": ("/v1/translate", {"model": "en-de", "inputs": [{"text": TEXT}]}, {}),
    "translate, a stream": ("/v1/translate", {"model": "en-de", "inputs": [{"text": TEXT}]}, STREAM),
    "generate": ("/v1/generate", {"model": LANGUAGE, "text": "the", "options": {"max_tokens": 9}}, {}),
    "generate, a stream": ("/v1/generate", {"model": LANGUAGE, "text": "the", "options": {"max_tokens": 9}}, STREAM),
    "score": ("/v1/score", {"model": "en-de", "sources": [{"text": TEXT}], "texts": [{"text": "Speichern."}]}, {}),
    "classify": ("/v1/classify", {"model": "mood", "inputs": [{"text": TEXT}]}, {}),
    "embed": ("/v1/embed", {"model": "mood", "inputs": [{"text": TEXT}]}, {}),
    "models": ("/v1/models", None, {}),
    "repository": ("/v1/repository", None, {}),
    "certificate": ("/v1/repository/en-de/3/certificate", None, {}),
    "the description": ("/openapi.json", None, {}),
    "health": ("/healthz", None, {}),
    "the studio": ("/", None, {}),
    "a wrong value": ("/v1/translate", {"inputs": [{"text": TEXT}], "options": {"beam_size": 999}}, {}),
    "no such model": ("/v1/translate", {"model": "none", "inputs": [{"text": TEXT}]}, {}),
    "no such route": ("/v1/nothing", None, {}),
    "v2": ("/v2", None, {}),
    "v2, health": ("/v2/health/ready", None, {}),
    "v2, metadata": ("/v2/models/mood", None, {}),
    "v2, configuration": ("/v2/models/en-de/config", None, {}),
    "v2, readiness": ("/v2/models/en-de/ready", None, {}),
    "v2, inference": ("/v2/models/en-de/infer", {"inputs": [TENSOR], "parameters": {"beam_size": 2}}, {}),
    "v2, classification": ("/v2/models/mood/infer", {"inputs": [TENSOR]}, {}),
    "v2, a wrong value": ("/v2/models/en-de/infer", {"inputs": [TENSOR], "parameters": {"beam_size": 999}}, {}),
    "v2, no such model": ("/v2/models/none/infer", {"inputs": [TENSOR]}, {}),
    "v2, the repository": ("/v2/repository/index", {}, {}),
    "no JSON that it knows": ("/v1/translate", {"sentences": []}, {}),
}


@pytest.fixture(scope="module")
def application() -> Iterator[None]:
    with cluster():
        deploy({"repo": str(REPOSITORY)}, num_replicas=2)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With the same models; the oracle."""
    with serving(tmp_path_factory.mktemp("server") / "log.txt", "--repo", str(REPOSITORY)) as running:
        yield running


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_as_by_a_server(name: str, application: None, server: ServerProcess) -> None:
    expected = ask(server.grpc, CALLS[name])
    assert ask(GRPC, CALLS[name]) == expected
    succeeds = name in {*METHODS, "health"} or (CALLS[name].path.startswith(OPEN) and "no such" not in name)
    assert (expected.code == "OK") == succeeds, expected  # it is what was meant


def test_every_method_of_ours_is_called() -> None:
    called = {call.path.rpartition("/")[2] for call in CALLS.values()}
    kserves = {method.name for method in oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    elsewhere = {"ModelStatistics", "RepositoryModelLoad", "RepositoryModelUnload"}
    assert {*METHODS, *kserves} - called == elsewhere


def test_statistics_are_those_of_one_replica(application: None) -> None:
    """Of that which was asked; its counts can't be compared with another server's."""
    [found] = ask(GRPC, kserve("ModelStatistics", name="mood")).messages
    assert [each["name"] for each in found["model_stats"]] == ["mood"]


@pytest.mark.parametrize("name", ["RepositoryModelLoad", "RepositoryModelUnload"])
def test_models_are_not_changed_in_one_replica_of_many(name: str, application: None) -> None:
    found = ask(GRPC, kserve(name, model_name="mood"))
    assert found.code == "UNIMPLEMENTED"
    assert "one replica of several" in found.details
    change = name.removeprefix("RepositoryModel").lower()
    assert http_ask(HTTP, f"/v1/repository/mood/{change}", {})[0] == 404
    status, _, content = http_ask(HTTP, f"/v2/repository/models/mood/{change}", {})
    assert (status, "one replica of several" in content["error"]) == (501, True)


def test_reflection_tells_the_services(application: None) -> None:
    with grpc.insecure_channel(GRPC) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        methods = pool.FindServiceByName("beamline.v1.Inference").methods
    assert {method.name for method in methods} == set(METHODS)


@pytest.mark.parametrize("name", ROUTES)
def test_a_route_answers_as_a_servers(name: str, application: None, server: ServerProcess) -> None:
    path, body, headers = ROUTES[name]
    expected = http_ask(server.http, path, body, headers)
    found = http_ask(HTTP, path, body, headers)
    assert found[:2] == expected[:2]
    assert lasting(found[2]) == lasting(expected[2])


def test_tokens_are_asked_for(tmp_path: Path, application: None) -> None:
    """Last, because it deploys anew. A token that may not do what is asked for is refused as well."""
    file = tmp_path / "tokens.toml"
    made = run_beamline("token", "me", "--file", str(file))
    assert made.returncode == 0, made.stderr
    bearer = f"Bearer {made.stdout.strip()}"
    deploy({"repo": str(REPOSITORY), "load": ["mood"], "tokens": str(file)}, num_replicas=2)
    classify, route = CALLS["Classify"], ROUTES["classify"][:2]
    assert ask(GRPC, classify, [("authorization", bearer)]).code == "OK"
    assert http_ask(HTTP, *route, {"authorization": bearer})[0] == 200
    for wrong in ([], [("authorization", "Bearer nonsense")]):
        refused = ask(GRPC, classify, wrong)
        assert refused.code == "UNAUTHENTICATED"
        assert "token" in refused.details
        status, _, content = http_ask(HTTP, *route, dict(wrong))
        assert status == 401
        assert "token" in content["error"]["message"]
    stream = ask(GRPC, CALLS["TranslateStream"])
    assert stream.code == "UNAUTHENTICATED"
    batch = http_ask(HTTP, "/v1/live/batch", None, {"authorization": bearer})
    assert batch[0] == 403
