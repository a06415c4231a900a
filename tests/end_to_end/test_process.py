"""The server as a process among others: signals, HTTP, memory, and the commands that talk to it."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.support.lively import MAX_LENGTH
from tests.support.processes import PATIENCE, ServerProcess, eventually, run_beamline, serving
from tests.support.text import english_lines

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "A value is an object. Every object has a type, and a name is bound to it.",
    "",
    "Grüße: 3 € für „Stück“…",
]


def translate(stub: beamline_pb2_grpc.InferenceStub, *texts: str, **options: object) -> list[list[pb.Hypothesis]]:
    request = pb.TranslateRequest(
        inputs=[pb.Input(text=text) for text in texts],
        options=pb.DecodingOptions(**options),  # type: ignore[arg-type]
    )
    return [list(found.hypotheses) for found in stub.Translate(request, timeout=PATIENCE).translations]


def expected_lines(server: ServerProcess) -> list[str]:
    """What `beamline translate` should print for LINES: a blank line stays one."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        return [translate(stub, line, split_sentences=True)[0][0].text if line else "" for line in LINES]


def test_sigterm_finishes_what_runs_and_refuses_the_rest(model_repository: Path, tmp_path: Path) -> None:
    with (
        serving(
            tmp_path / "log.txt", "--repo", str(model_repository), "--threads", "1", "--drain-seconds", "none"
        ) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        stub = beamline_pb2_grpc.InferenceStub(channel)
        long = pb.DecodingOptions(beam_size=8, min_length=MAX_LENGTH, max_length=MAX_LENGTH, return_tokens=True)
        running = stub.Translate.future(
            pb.TranslateRequest(inputs=[pb.Input(text=line) for line in LINES if line] * 20, options=long)
        )
        eventually(lambda: server.metrics()("beamline_active_slots") > 0, "it is decoded")
        server.process.terminate()
        eventually(lambda: "draining" in server.log.read_text(), "it drains")
        with pytest.raises(grpc.RpcError) as refused:
            translate(stub, "too late")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        translations = running.result(timeout=2 * PATIENCE).translations
        assert [len(found.hypotheses[0].tokens) for found in translations] == [MAX_LENGTH - 1] * 60
        assert server.process.wait(timeout=PATIENCE) == 0
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


def test_http_says_how_it_is(server: ServerProcess) -> None:
    assert server.get("/healthz") == (200, "ok")
    assert server.get("/nothing")[0] == 404
    with grpc.insecure_channel(server.grpc) as channel:
        translate(beamline_pb2_grpc.InferenceStub(channel), "a value")
    eventually(lambda: server.metrics()("beamline_requests_total", outcome="ok") >= 1, "it is counted")
    metrics = server.metrics()
    assert metrics("beamline_slots", model="tiny") == 32
    for name in ("queue_seconds", "first_token_seconds", "request_seconds", "step_seconds", "batch_occupancy"):
        assert metrics(f"beamline_{name}_count", model="tiny") >= 1, name
    assert metrics("beamline_source_tokens_total") >= 2
    assert metrics("beamline_target_tokens_total") >= 1


def test_the_plan_is_printed(server: ServerProcess) -> None:
    log = server.log.read_text()
    assert "tiny version 1 (marian)" in log
    assert "32 slots, up to 16 beams each" in log
    assert re.search(r"\d+ MiB of memory taken by loading it; caches come on top as they are used, up to \d+ MiB", log)


def test_translate_takes_arguments(server: ServerProcess) -> None:
    found = run_beamline("translate", "--target", server.grpc, *(line for line in LINES if line))
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [line for line in expected_lines(server) if line]


def test_translate_reads_lines(server: ServerProcess, tmp_path: Path) -> None:
    text = "\n".join(LINES) + "\n"
    (tmp_path / "lines.txt").write_text(text, encoding="utf-8")
    piped = run_beamline("translate", "--target", server.grpc, text=text)
    filed = run_beamline("translate", "--target", server.grpc, "--file", str(tmp_path / "lines.txt"))
    assert (piped.returncode, piped.stderr) == (0, "")
    assert piped.stdout.splitlines() == expected_lines(server)
    assert filed.stdout == piped.stdout


def test_translate_gives_several_and_their_scores(server: ServerProcess) -> None:
    found = run_beamline(
        "translate", "--target", server.grpc, "--model", "tiny", "--beam", "5", "--nbest", "3", "--scores", LINES[0]
    )
    assert found.returncode == 0, found.stderr
    with grpc.insecure_channel(server.grpc) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        best = translate(stub, LINES[0], beam_size=5, num_hypotheses=3, return_scores=True)[0]
    lines = [line.split("\t") for line in found.stdout.splitlines()]
    assert [text for _, text in lines] == [hypothesis.text for hypothesis in best]
    assert [float(score) for score, _ in lines] == pytest.approx([one.score for one in best], abs=1e-3)


def test_translate_says_what_went_wrong(server: ServerProcess) -> None:
    unknown = run_beamline("translate", "--target", server.grpc, "--model", "nope", "a")
    assert unknown.returncode == 2
    assert unknown.stderr == "beamline: there is no model 'nope' here; there is tiny\n"
    nowhere = run_beamline("translate", "--target", "127.0.0.1:1", "a")
    assert nowhere.returncode == 2
    assert nowhere.stderr.startswith("beamline: nothing answers at 127.0.0.1:1: start a server with `beamline serve`")


def test_models_lists_the_repository(model_repository: Path) -> None:
    found = run_beamline("models", "--repo", str(model_repository))
    assert (found.returncode, found.stderr) == (0, "")
    head, line = found.stdout.splitlines()
    assert head.split() == ["name", "versions", "task", "family", "size", "parity"]
    assert line.split()[:4] == ["tiny", "1", "translate", "marian"]
    assert "100.0% beam-exact" in line


@pytest.mark.parametrize("broken", [False, True], ids=["empty", "broken"])
def test_a_repository_without_a_model_is_refused(tmp_path: Path, broken: bool) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    if broken:
        (repository / "de" / "1").mkdir(parents=True)
        (repository / "de" / "1" / "manifest.json").write_text("{}")
    found = run_beamline(
        "serve", "--repo", str(repository), "--grpc-port", "0", "--metrics-port", "0", "--http-port", "0"
    )
    assert found.returncode == 2
    assert found.stdout == ""
    assert f"beamline: no model of the repository {repository} can be served" in found.stderr
    assert (f"{repository}/de/1/manifest.json" in found.stderr) is broken
    assert "Traceback" not in found.stderr


# -- memory ----------------------------------------------------------------------------------------------------------

MIB = 2**20


def work(stub: beamline_pb2_grpc.InferenceStub, calls: int, begin: int = 0) -> None:
    """Calls of every shape, several at once."""
    lines = [line for line in english_lines() if 3 < len(line.strip()) < 100]
    pending = []
    for number in range(begin, begin + calls):
        texts = [lines[(7 * number + index) % len(lines)] for index in range(1 + number % 5)]
        options = pb.DecodingOptions(beam_size=1 + number % 8, max_length=8 + 8 * (number % 9))
        request = pb.TranslateRequest(inputs=[pb.Input(text=text) for text in texts], options=options)
        pending.append(stub.Translate.future(request, timeout=PATIENCE))
        if len(pending) >= 8:
            pending.pop(0).result()
    for call in pending:
        call.result()


def growth(server: ServerProcess, calls: int) -> int:
    """Resident bytes after 3 * calls, less those after `calls`. Every shape has been seen before."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        work(stub, calls)
        early = server.resident_bytes()
        work(stub, calls)
        work(stub, calls)
        return server.resident_bytes() - early


def test_memory_does_not_grow_with_requests(server: ServerProcess) -> None:
    steps = server.metrics()("beamline_step_seconds_count")
    assert growth(server, calls=72) < 64 * MIB  # loose, but a cache that is copied and kept at every step is more
    assert server.metrics()("beamline_step_seconds_count") - steps > 300


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_in_a_long_run(server: ServerProcess) -> None:
    assert growth(server, calls=3600) < 24 * MIB
