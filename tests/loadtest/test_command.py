"""`beamline loadtest` as its user sees it: files, exit codes, and everything that can go wrong with a server."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.loadtest.load.arrivals import Poisson
from beamline.loadtest.report.document import read
from beamline.serving.security.access import Scope
from beamline.serving.security.tokens import new_token
from tests.loadtest.doubles import closed_port, echo_server, latency_of, self_signed, silent_listener
from tests.support.processes import (
    PATIENCE,
    ROOT,
    ServerProcess,
    beamline,
    environment,
    eventually,
    run_beamline,
    serving,
)

SHORT = ("--duration", "0.8s", "--warmup", "0.2s", "--rate", "40", "--lengths", "fixed:8", "--quiet")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server") / "log.txt", "--fake", "--fake-step-ms", "1") as running:
        yield running


def loadtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_beamline("loadtest", *arguments)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "requests.csv").open() as file:
        return list(csv.DictReader(file))


# -- what it leaves --------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_table_and_its_files(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    where = ("--target", server.grpc, "--metrics", server.metrics_address, "--model", "fake", "--out", str(out))
    gates = ("--fail-if", "p95>1h", "--fail-if", "errors>0")
    found = loadtest(*where, *SHORT, *gates, "--workers", "2", "--seed", "3")
    assert (found.returncode, found.stderr) == (0, "")
    assert "Poisson, 40/s" in found.stdout
    report = read(out)
    stage = report.stages[0]
    assert stage.sent == stage.ok > 20
    assert stage.failed == 0
    assert stage.server[0].slots == 8
    assert latency_of(stage).minimum >= 0.009
    assert [gate.failed for gate in report.gates] == [False, False]
    # Two processes share one schedule.
    assert [float(row["intended"]) for row in rows(out)] == pytest.approx(Poisson(40).times(1.0, 3), abs=1e-6)
    assert sorted(int(row["number"]) for row in rows(out)) == list(range(len(rows(out))))
    assert {path.name for path in out.iterdir()} == {"report.json", "report.html", "report.md", "requests.csv"}
    assert "Load test of fake" in (out / "report.html").read_text()


def test_the_schema_is_stable(server: ServerProcess, tmp_path: Path) -> None:
    """Names that others' scripts read. A new one may be added here; one that goes needs a new format version."""
    assert loadtest("--target", server.grpc, "--out", str(tmp_path), *SHORT).returncode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["format"], report["format_version"]) == ("beamline.loadtest", 1)
    assert {"created", "title", "setup", "machine", "stages", "search", "gates", "complete"} <= set(report)
    stage = report["stages"][0]
    assert {
        "arrivals", "open_loop", "offered_rate", "warmup", "seconds", "sent", "ok", "failed", "throughput", "latency",
        "first_token", "token_gap", "server_queue", "statuses", "timeline", "blocks", "curve", "histogram", "server",
        "server_times", "client", "notes", "stopped",
    } <= set(stage)  # fmt: skip
    assert set(stage["latency"]) == {"count", "mean", "minimum", "maximum", "percentiles"}
    assert set(stage["latency"]["percentiles"][0]) == {"share", "seconds", "interval", "at_least"}
    assert stage["first_token"] is None  # nothing was streamed


def test_a_failed_gate_is_an_exit_code(server: ServerProcess) -> None:
    failed = loadtest("--target", server.grpc, *SHORT, "--fail-if", "p50>1ms")
    assert failed.returncode == 1
    assert "FAILED  p50>1ms: measured" in failed.stdout


STAGES = ("--duration", "0.5s", "--warmup", "0s", "--lengths", "fixed:8", "--quiet")


def test_search_and_comparison(server: ServerProcess, tmp_path: Path) -> None:
    limits = ("--slo", "p50=1h", "--rate", "40", "--max-rate", "60")
    searched = loadtest("--target", server.grpc, *STAGES, *limits, "--out", str(tmp_path))
    report = read(tmp_path)
    assert report.search is not None
    if report.search.exhausted:
        assert searched.returncode == 0, searched.stderr
        assert "p50=1h holds up to 60.0/s, the highest that was tried" in searched.stdout
    else:  # the machine is so busy that one of the two did not come up to it, and the report says which
        assert any(stage.notes or stage.client.saturated for stage in report.stages)
    compared = loadtest("compare", str(tmp_path), str(tmp_path / "report.json"))
    assert compared.returncode == 0, compared.stderr
    assert "Too short to tell" in compared.stdout


@pytest.mark.full
def test_sweep_and_a_search_in_vain(server: ServerProcess, tmp_path: Path) -> None:
    swept = loadtest("--target", server.grpc, *STAGES, "--sweep", "20,40", "--out", str(tmp_path))
    assert swept.returncode == 0, swept.stderr
    assert [stage.offered_rate for stage in read(tmp_path).stages] == [20, 40]
    impossible = loadtest("--target", server.grpc, *STAGES, "--slo", "p50=1us", "--rate", "80")
    assert impossible.returncode == 1
    assert "no rate held p50=1us: at 5.00/s p50 was" in impossible.stdout


@pytest.mark.full
def test_a_search_lengthens_stages_that_would_be_too_short(server: ServerProcess, tmp_path: Path) -> None:
    """Half a second at 20/s are ten requests: too few for p95 to mean anything."""
    limits = ("--slo", "p95=1h", "--rate", "20", "--max-rate", "20", "--out", str(tmp_path))
    found = loadtest("--target", server.grpc, *STAGES, *limits)
    assert found.returncode == 0, found.stderr
    for stage in read(tmp_path).stages:
        assert stage.seconds == pytest.approx(5.0)
        assert 0.95 in {each.share for each in latency_of(stage).percentiles}


@pytest.mark.full
def test_a_sweep_that_ends_early_says_what_did_not_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", "1") as server,
        running(server, out, "--give-up", "1s", "--sweep", "40,50,60") as client,
    ):
        server.process.kill()
        text, _ = client.communicate(timeout=PATIENCE)
    assert client.returncode == 3
    assert "NOT RUN: Poisson, 50/s, Poisson, 60/s" in text
    assert "- Not run: Poisson, 50/s, Poisson, 60/s" in (out / "report.md").read_text()


def test_a_trace_is_replayed(server: ServerProcess, tmp_path: Path) -> None:
    lines = [
        {"time": 100 + 0.01 * number, "text": "abc" * (1 + number % 3), "options": {"beam_size": 1 + number % 2}}
        for number in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ("--trace", str(tmp_path / "trace.jsonl"), "--speed", "0.5", "--model", "fake", "--quiet")
    found = loadtest("--target", server.grpc, *arguments, "--out", str(tmp_path / "out"))
    assert found.returncode == 0, found.stderr
    sent = rows(tmp_path / "out")
    assert [float(row["intended"]) for row in sent] == pytest.approx([0.02 * number for number in range(40)])
    assert [int(row["source_tokens"]) for row in sent] == [3 * (1 + number % 3) + 1 for number in range(40)]


def test_texts_options_and_models_are_mixed(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\n\ntwo two\n")
    mixes = ("--options", "3:beam_size=1", "--options", "beam_size=4,return_scores=true", "--model", "fake")
    texts = ("--texts", str(tmp_path / "texts.txt"), "--model", "2:fake/1", "--out", str(tmp_path / "out"))
    found = loadtest("--target", server.grpc, *SHORT, *mixes, *texts)
    assert found.returncode == 0, found.stderr
    assert {row["model"] for row in rows(tmp_path / "out")} == {"fake", "fake/1"}
    assert [each.model for each in read(tmp_path / "out").stages[0].by_model] == ["fake", "fake/1"]
    assert {row["source_tokens"] for row in rows(tmp_path / "out")} == {"4", "8"}


# -- what can't be measured ------------------------------------------------------------------------------------------


def test_nobody_there(tmp_path: Path) -> None:
    found = loadtest("--target", closed_port(), "--connect-timeout", "1s", "--out", str(tmp_path), *SHORT)
    assert found.returncode == 2
    assert "is not available" in found.stderr
    assert "Connection refused" in found.stderr


def test_somebody_there_who_never_answers() -> None:
    with silent_listener() as target:
        found = loadtest("--target", target, "--connect-timeout", "1s", *SHORT)
    assert found.returncode == 2
    assert f"the server at {target} accepts connections but did not answer for 1 s" in found.stderr


def test_the_first_request_shows_what_is_wrong(server: ServerProcess) -> None:
    unknown = loadtest("--target", server.grpc, "--model", "fake", "--model", "nope", *SHORT)
    assert unknown.returncode == 2
    assert "refuses the first request for model 'nope': there is no model 'nope' here" in unknown.stderr
    wrong = loadtest("--target", server.grpc, "--options", "beam_size=99", *SHORT)
    assert wrong.returncode == 2
    assert "with beam_size=99" in wrong.stderr
    assert "(INVALID_ARGUMENT)" in wrong.stderr


def test_tls_and_tokens(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    (tmp_path / "token").write_text("open sesame\n")
    (tmp_path / "wrong").write_text("open barley\n")
    with echo_server(certificate, token="open sesame") as target:
        trusted = ("--target", target, "--tls-ca", str(certificate.certificate), *SHORT)
        good = loadtest(*trusted, "--token-file", str(tmp_path / "token"), "--out", str(tmp_path))
        assert good.returncode == 0, good.stderr
        assert read(tmp_path).setup.tls
        assert "sesame" not in (tmp_path / "report.json").read_text()
        refused = loadtest(*trusted, "--token-file", str(tmp_path / "wrong"))
        assert refused.returncode == 2
        assert "who are you? (UNAUTHENTICATED)" in refused.stderr


@pytest.mark.full
def test_metrics_that_need_the_token(tmp_path: Path) -> None:
    token, entry = new_token("reader", (Scope.INFER,), None)
    (tmp_path / "tokens.toml").write_text(entry)
    (tmp_path / "token").write_text(token)
    guarded = ("--fake", "--tokens", str(tmp_path / "tokens.toml"), "--metrics-need-token")
    with serving(tmp_path / "log.txt", *guarded) as server:
        where = ("--target", server.grpc, "--metrics", server.metrics_address, *SHORT)
        found = loadtest(*where, "--token-file", str(tmp_path / "token"), "--out", str(tmp_path / "out"))
        assert found.returncode == 0, found.stderr
        assert read(tmp_path / "out").stages[0].server
        unknown = loadtest(*where)
        assert unknown.returncode == 2
        assert "give the server's token with --token-file" in unknown.stderr


@pytest.mark.full
def test_tls_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with echo_server(self_signed(tmp_path)) as target:
        where = ("--target", target, "--connect-timeout", "1s", *SHORT)
        plain = loadtest(*where)
        assert plain.returncode == 2
        assert target in plain.stderr
        distrusted = loadtest(*where, "--tls-ca", str(self_signed(tmp_path / "other").certificate))
        assert distrusted.returncode == 2
        assert "not available" in distrusted.stderr
        named = loadtest(*where, "--tls-ca", str(tmp_path / "cert.pem"), "--tls-name", "elsewhere.example")
        assert named.returncode == 2


# -- what goes wrong in the middle -----------------------------------------------------------------------------------


def running(server: ServerProcess, out: Path, *arguments: str) -> subprocess.Popen[str]:
    """A long run that has begun to get answers."""
    before = server.metrics()("beamline_requests_total", outcome="ok")
    command = beamline("loadtest", "--target", server.grpc, "--out", str(out), "--quiet", "--lengths", "fixed:8")
    client = subprocess.Popen(
        [*command, "--duration", "100s", "--warmup", "0s", "--rate", "50", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    eventually(lambda: server.metrics()("beamline_requests_total", outcome="ok") >= before + 30, "the run goes on")
    return client


def test_a_killed_server(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", "1") as server,
        running(server, out, "--give-up", "1s") as client,
    ):
        server.process.kill()
        text, errors = client.communicate(timeout=PATIENCE)
    assert (client.returncode, errors) == (3, "")
    assert "STOPPED EARLY: the server gave no good answer for 1 s (UNAVAILABLE)" in text
    report = read(out)
    stage = report.stages[0]
    assert not report.complete
    assert stage.ok >= 25
    assert stage.ok + stage.failed == stage.sent
    assert latency_of(stage).count == stage.ok
    assert "UNAVAILABLE" in {each.status for each in stage.after}
    # The dead second is not measured: all answers came in the measured time.
    assert stage.throughput * stage.seconds == pytest.approx(stage.ok, abs=1.5)
    assert "the last good answer came" in text
    assert "Stopped early: the server gave no good answer for 1 s" in (out / "report.md").read_text()
    assert {row["status"] for row in rows(out)} >= {"OK", "UNAVAILABLE"}
    assert (out / "report.html").exists()


def test_a_server_that_freezes(tmp_path: Path) -> None:
    """The connection stands, and nothing comes: every request ends at its deadline."""
    out = tmp_path / "out"
    with serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", "1") as server:
        with running(server, out, "--deadline", "0.5s", "--give-up", "1s") as client:
            server.process.send_signal(signal.SIGSTOP)
            text, _ = client.communicate(timeout=PATIENCE)
        server.process.send_signal(signal.SIGCONT)
    assert client.returncode == 3
    assert "(DEADLINE_EXCEEDED)" in text
    stage = read(out).stages[0]
    late = [each for each in (*stage.statuses, *stage.after) if each.status == "DEADLINE_EXCEEDED"]
    assert sum(each.count for each in late) >= 20
    assert f"{late[-1].count} DEADLINE_EXCEEDED after the measured time" in text


def test_an_interruption_keeps_what_there_is(server: ServerProcess, tmp_path: Path) -> None:
    with running(server, tmp_path) as client:
        os.killpg(client.pid, signal.SIGINT)  # as a terminal does it: to the parent and its workers
        text, errors = client.communicate(timeout=PATIENCE)
    assert (client.returncode, errors) == (3, "")
    assert "STOPPED EARLY: interrupted" in text
    stage = read(tmp_path).stages[0]
    assert stage.ok > 0
    assert stage.failed == 0  # what we did not wait for is not the server's failure
    assert stage.ok + stage.unfinished == stage.sent


@pytest.mark.full
def test_an_interruption_of_slow_answers(tmp_path: Path) -> None:
    """One second for each, one after the other: most are under way when the run is interrupted."""
    load = ("--lengths", "fixed:1", "--rate", "20", "--warmup", "0s", "--deadline", "1h", "--quiet")
    with serving(tmp_path / "log.txt", "--fake", "--fake-step-ms", "500", "--fake-slots", "1") as server:
        client = subprocess.Popen(
            beamline("loadtest", "--target", server.grpc, *load, "--out", str(tmp_path / "out")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        eventually(lambda: server.metrics()("beamline_queue_length") >= 5, "the run goes on")
        os.killpg(client.pid, signal.SIGINT)
        text, errors = client.communicate(timeout=PATIENCE)
        server.process.kill()
        server.process.wait()
    assert (client.returncode, errors) == (3, "")
    stage = read(tmp_path / "out").stages[0]
    assert (stage.failed, stage.ok + stage.unfinished) == (0, stage.sent)
    assert stage.unfinished >= 5
    assert "UNFINISHED" in {row["status"] for row in rows(tmp_path / "out")}
    assert f"{stage.unfinished} not finished" in text


def test_overload_is_counted_by_status(tmp_path: Path) -> None:
    """A full queue refuses; what is answered is still measured."""
    limits = ("--fake-step-ms", "20", "--fake-slots", "1", "--max-queue", "2")
    with serving(tmp_path / "log.txt", "--fake", *limits) as server:
        found = loadtest("--target", server.grpc, "--out", str(tmp_path / "out"), *SHORT)
    assert found.returncode == 3
    stage = read(tmp_path / "out").stages[0]
    counts = {each.status: each for each in stage.statuses}
    assert counts["OK"].count > 0
    assert counts["RESOURCE_EXHAUSTED"].count == stage.failed
    assert "the queue of fake is full" in counts["RESOURCE_EXHAUSTED"].detail


@pytest.mark.parametrize(
    ("method", "model", "option"),
    [("translate-stream", "fake", "beam_size=2"), ("generate", "fake-lm", "temperature=0.5")],
)
def test_streams_have_a_first_token_and_gaps(
    server: ServerProcess, tmp_path: Path, method: str, model: str, option: str
) -> None:
    """A step takes a millisecond, and the echo of eight letters comes in as many pieces."""
    load = ("--method", method, "--model", model, "--options", option, "--fail-if", "first_token_p50>1h")
    found = loadtest("--target", server.grpc, "--out", str(tmp_path), *SHORT, *load)
    assert (found.returncode, found.stderr) == (0, "")
    stage = read(tmp_path).stages[0]
    assert stage.first_token is not None
    assert stage.token_gap is not None
    assert stage.first_token.count == stage.ok > 20
    assert stage.token_gap.count > 0
    assert latency_of(stage).mean > stage.first_token.mean > 0
    assert "token gap" in found.stdout
