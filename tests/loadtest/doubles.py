"""Reports without a run, and servers without an engine."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from beamline.loadtest.judgement.statistics import Statistics
from beamline.loadtest.load.arrivals import Poisson
from beamline.loadtest.load.records import Recorder, Records
from beamline.loadtest.load.worker_messages import WorkerHealth
from beamline.loadtest.load.worker_pool import StageOutcome
from beamline.loadtest.report.document import Distribution, Interval, Machine, Report, SearchResult, Setup, Stage
from beamline.loadtest.stage import StagePlan, stage_of
from beamline.loadtest.targets.status import OK
from beamline.protos import beamline_pb2 as pb


def records_of(
    intended: Iterable[float], latencies: Iterable[float], statuses: Sequence[int] | None = None, detail: str = ""
) -> Records:
    recorder = Recorder(("m",))
    for number, (at, latency) in enumerate(zip(intended, latencies, strict=True)):
        status = OK if statuses is None else statuses[number]
        recorder.add(
            number=number, model="m", status=status, intended=at, sent=at, finished=at + latency, detail=detail,
            source_tokens=4, target_tokens=5, server_queue=latency / 10,
        )  # fmt: skip
    return recorder.records()


def exponential_stage(mean: float = 0.05, rate: float = 200.0, seconds: float = 30.0, seed: int = 0) -> Stage:
    """Independent latencies, so that what an interval should be is known."""
    times = Poisson(rate).times(seconds, seed)
    latencies = np.random.default_rng([seed, 9]).exponential(mean, len(times))
    return stage_from(records_of(times, latencies), rate, seconds)


def stage_from(
    records: Records,
    rate: float,
    seconds: float,
    warmup: float = 0.0,
    stopped: str | None = None,
    lost: bool = False,
    shares: Iterable[float] = (),
) -> Stage:
    health = WorkerHealth(cpu_seconds=0.1, wall_seconds=seconds, loop_lags=np.full(10, 1e-4))
    outcome = StageOutcome(records, (health,), 0.0, seconds, stopped, lost)
    return stage_of(outcome, Poisson(rate), StagePlan(seconds, warmup, 0, frozenset(shares)), None, 0.5)


def search_of(**changed: Any) -> SearchResult:
    found = {"limit": "p95=500ms", "rate": 75, "stage": 2, "limited_by_client": False, "exhausted": False}
    return SearchResult.model_validate({**found, "conclusion": "p95=500ms holds up to 75.0/s", **changed})


def report_of(*stages: Stage, search: SearchResult | None = None) -> Report:
    setup = Setup(
        target="127.0.0.1:1", protocol="beamline.v1", models=("m",), workload="texts", options=(), seed=0, workers=1,
        channels=2, deadline=30.0, tls=False, token=False, command="beamline loadtest",
    )  # fmt: skip
    return Report(
        created="2026-01-01T00:00:00+00:00",
        title="A test",
        setup=setup,
        machine=Machine(system="Linux", cpus=2, python="3.11", beamline="0"),
        stages=stages,
        search=search,
        gates=(),
        complete=True,
    )


def latency_of(stage: Stage | Statistics) -> Distribution:
    assert stage.latency is not None
    return stage.latency


def interval_of(stage: Stage, share: float) -> Interval:
    found = next(each.interval for each in latency_of(stage).percentiles if each.share == share)
    assert found is not None
    return found


# -- servers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificate:
    key: Path
    certificate: Path


def self_signed(folder: Path) -> Certificate:
    made = Certificate(folder / "key.pem", folder / "cert.pem")
    assert shutil.which("openssl"), "needs openssl"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return made


@contextmanager
def echo_server(certificate: Certificate | None = None, token: str | None = None) -> Iterator[str]:
    """Answers at once; its address. With `token`, only to those who know it."""

    def translate(request: pb.TranslateRequest, context: grpc.ServicerContext) -> pb.TranslateResponse:
        if token is not None and ("authorization", f"Bearer {token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        hypotheses = [pb.Hypothesis(text=request.inputs[0].text)]
        return pb.TranslateResponse(translations=[pb.Translation(hypotheses=hypotheses, target_tokens=1)])

    handler = grpc.unary_unary_rpc_method_handler(
        translate, pb.TranslateRequest.FromString, pb.TranslateResponse.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("beamline.v1.Inference", {"Translate": handler}),)
    )
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (certificate.key.read_bytes(), certificate.certificate.read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def silent_listener() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
