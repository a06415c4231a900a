"""The same tool over the open inference protocol: against our own server, and at servers that are not ours."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from beamline.loadtest.report.document import read
from beamline.loadtest.targets.open_inference import OpenInferenceTarget
from beamline.loadtest.targets.status import OK, STATUS_NAMES
from beamline.loadtest.targets.target import Connection, Options, Request
from beamline.protos import open_inference_pb2 as oip
from tests.loadtest.doubles import closed_port
from tests.support.processes import ServerProcess, run_beamline, serving

SHORT = ("--duration", "0.8s", "--warmup", "0.2s", "--rate", "40", "--lengths", "fixed:8", "--quiet")
PROTOCOL = ("--protocol", "open-inference")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server") / "log.txt", "--fake", "--fake-step-ms", "1") as running:
        yield running


def test_a_run_at_our_own_door(server: ServerProcess, tmp_path: Path) -> None:
    where = (
        *PROTOCOL,
        "--target",
        server.grpc,
        "--metrics",
        server.metrics_address,
        "--model",
        "fake",
        "--out",
        str(tmp_path),
    )
    found = run_beamline("loadtest", *where, *SHORT, "--options", "beam_size=2,length_penalty=0.5")
    assert (found.returncode, found.stderr) == (0, "")
    report = read(tmp_path)
    assert report.setup.protocol == "open-inference"
    stage = report.stages[0]
    assert stage.sent == stage.ok > 20
    assert stage.latency is not None
    assert stage.latency.minimum >= 0.009  # nine steps of a millisecond
    assert stage.server[0].slots == 8
    assert server.metrics()("beamline_calls_total", method="/inference.GRPCInferenceService/ModelInfer") >= stage.ok


def test_streams_are_timed(server: ServerProcess, tmp_path: Path) -> None:
    where = (*PROTOCOL, "--target", server.grpc, "--stream", "--model", "fake/1", "--out", str(tmp_path))
    found = run_beamline("loadtest", *where, *SHORT)
    assert (found.returncode, found.stderr) == (0, "")
    stage = read(tmp_path).stages[0]
    assert stage.first_token is not None
    assert stage.first_token.count == stage.ok > 20


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*PROTOCOL, "--model", "nope"), "there is no model 'nope' here; there is fake"),
        ((*PROTOCOL, "--options", "beams=4"), "parameter 'beams' is not known"),
        ((*PROTOCOL, "--stream", "--options", "beam_size=99"), "beam_size is 99"),
        ((*PROTOCOL, "--input", "words"), "no such BYTES input for a text; its inputs are text (BYTES), token_ids"),
        (("--stream",), "--stream and --input belong to --protocol open-inference"),
    ],
)
def test_the_first_request_shows_what_is_wrong(
    server: ServerProcess, arguments: tuple[str, ...], sentence: str
) -> None:
    found = run_beamline("loadtest", "--target", server.grpc, *SHORT, *arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert sentence in found.stderr


# -- servers that are not ours ---------------------------------------------------------------------------------------


class Stranger:
    """A KServe server whose model has inputs of its own; it notes what it is asked."""

    def __init__(self, *inputs: tuple[str, str, tuple[int, ...]]) -> None:
        self.inputs = inputs
        self.asked: list[oip.ModelInferRequest] = []

    def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Any) -> oip.ModelMetadataResponse:
        tensor = oip.ModelMetadataResponse.TensorMetadata
        inputs = [tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in self.inputs]
        return oip.ModelMetadataResponse(name=request.name, versions=["1"], inputs=inputs)

    def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        self.asked.append(request)
        return oip.ModelInferResponse(model_name=request.model_name)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[oip.ModelStreamInferResponse]:
        """Three pieces and an empty end, as a decoupled model sends them; or an error."""
        for request in requests:
            self.asked.append(request)
            if "fail" in request.parameters:
                yield oip.ModelStreamInferResponse(error_message="it broke")
                continue
            for _ in range(3):
                piece = oip.ModelInferResponse(id=request.id)
                piece.outputs.add(name="text_output", datatype="BYTES", shape=[1])
                yield oip.ModelStreamInferResponse(infer_response=piece)
            last = oip.ModelInferResponse(id=request.id)
            last.parameters["triton_final_response"].bool_param = True
            yield oip.ModelStreamInferResponse(infer_response=last)

    @contextmanager
    def listening(self) -> Iterator[str]:
        server = grpc.server(ThreadPoolExecutor(4))
        handlers: dict[str, Any] = {
            "ModelMetadata": (grpc.unary_unary_rpc_method_handler, oip.ModelMetadataRequest),
            "ModelInfer": (grpc.unary_unary_rpc_method_handler, oip.ModelInferRequest),
            "ModelStreamInfer": (grpc.stream_stream_rpc_method_handler, oip.ModelInferRequest),
        }
        made = {
            name: make(getattr(self, name), message.FromString, lambda response: response.SerializeToString())
            for name, (make, message) in handlers.items()
        }
        service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", made)
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None)


def request(model: str, text: str, options: Options) -> Request:
    return Request(0, text, model, options)


async def ask(address: str, *requests: Request, **settings: Any) -> list[Any]:
    target = OpenInferenceTarget(Connection(address, protocol="open-inference", connect_timeout=60.0, **settings))
    await target.connect()
    try:
        return [await target.send(each) for each in requests]
    finally:
        await target.close()


async def test_the_input_is_the_models_own() -> None:
    stranger = Stranger(("text_input", "BYTES", (-1, 1)), ("max_tokens", "INT32", (-1, 1)))
    options = (("temperature", "0.5"), ("stream", "true"), ("stop", "###"), ("n", "3"))
    with stranger.listening() as address:
        replies = await ask(address, request("llm/2", "héllo", options), request("llm", "b", ()))
    assert [reply.status for reply in replies] == [OK, OK]
    first, second = stranger.asked
    assert (first.model_name, first.model_version, second.model_version) == ("llm", "2", "")
    assert (first.inputs[0].name, list(first.inputs[0].shape)) == ("text_input", [1, 1])
    assert list(first.raw_input_contents) == [struct.pack("<I", 6) + "héllo".encode()]
    parameters = first.parameters
    assert parameters["temperature"].double_param == 0.5
    assert parameters["stream"].bool_param is True
    assert parameters["stop"].string_param == "###"
    assert parameters["n"].int64_param == 3
    assert list(second.raw_input_contents) == [struct.pack("<I", 1) + b"b"]  # nothing is left of the first


async def test_one_of_several_inputs_is_named() -> None:
    stranger = Stranger(("prompt", "BYTES", (-1,)), ("system", "BYTES", (-1,)))
    with stranger.listening() as address:
        (unclear,) = await ask(address, request("llm", "a", ()))
        (named,) = await ask(address, request("llm", "a", ()), input_name="system")
    assert "several BYTES inputs: name one with --input" in unclear.detail
    assert named.status == OK
    assert stranger.asked[0].inputs[0].name == "system"


async def test_a_decoupled_stream_is_timed_piece_by_piece() -> None:
    stranger = Stranger(("text_input", "BYTES", (-1,)))
    with stranger.listening() as address:
        good, bad = await ask(address, request("llm", "a", ()), request("llm", "a", (("fail", "true"),)), stream=True)
    assert (good.status, len(good.token_times)) == (OK, 3)
    assert list(good.token_times) == sorted(good.token_times)
    assert (STATUS_NAMES[bad.status], bad.detail) == ("UNKNOWN", "it broke")


async def test_failures_are_replies() -> None:
    with Stranger(("text", "BYTES", (-1, 4))).listening() as address:
        (wrong,) = await ask(address, request("llm", "a", ()))
    assert "has shape [1, 4]; it must take one text" in wrong.detail
    target = OpenInferenceTarget(Connection(closed_port(), protocol="open-inference"))
    try:
        assert STATUS_NAMES[(await target.send(request("llm", "a", ()))).status] == "UNAVAILABLE"
    finally:
        await target.close()
