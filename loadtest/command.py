"""`beamline loadtest`: measure a server from outside, and compare two measurements.

Exit codes: 0 measured, and all is well; 1 a `--fail-if` failed, or no rate held the `--slo`; 2 nothing could be
measured; 3 requests failed or the run was cut short: the report holds what there is.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
from pathlib import Path

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.judgement import compare
from beamline.loadtest.judgement.gate import Gate, parse_gate, parse_slo, shares_of
from beamline.loadtest.judgement.rate_search import Bounds
from beamline.loadtest.load.arrivals import Arrivals, Replay
from beamline.loadtest.load.worker_pool import start_workers
from beamline.loadtest.load.workload import Workload
from beamline.loadtest.options import add_run_arguments, connection_of, load_of, workers_for
from beamline.loadtest.report import files
from beamline.loadtest.report.document import GateResult, Machine, Report, Setup, Stage, read
from beamline.loadtest.report.progress_line import ProgressLine
from beamline.loadtest.report.table import summary
from beamline.loadtest.runner import Run, Runner
from beamline.loadtest.stage import StagePlan
from beamline.loadtest.targets.grpc_target import token_of
from beamline.loadtest.targets.server_metrics import Scraper
from beamline.loadtest.targets.target import Connection
from beamline.version import beamline_version

HELP = "measure a server's latency and throughput"

_AFTER_THE_LAST = 1e-3  # seconds; times before a stage's end are sent, and the last one shall be

GATE_FAILED, NOT_MEASURED, REQUESTS_FAILED = 1, 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    other = parser.add_argument_group(
        "comparing two runs",
        "What changed from report A to report B, and what is noise; both are a report.json or its folder.",
    )
    # No subparser: it would take the value of an option that does not exist for its own name, and say so.
    other.add_argument("action", nargs="*", metavar="compare A B", help="instead of a measurement")


def run(args: argparse.Namespace) -> int:
    try:
        if args.action:
            return _compare(args.action)
        return _measure(args)
    except LoadTestError as error:
        print(f"beamline: {error}", file=sys.stderr)
        return NOT_MEASURED


def _compare(words: list[str]) -> int:
    if words[0] != "compare" or len(words) != 3:
        raise LoadTestError(f"{shlex.join(words)} can't be done; write compare A B, or nothing to measure")
    print(compare.text(read(Path(words[1])), read(Path(words[2]))), end="")
    return 0


def _measure(args: argparse.Namespace) -> int:
    connection = connection_of(args)
    arrivals, workload, models = load_of(args)
    gates = [parse_gate(text) for text in args.fail_if]
    slo = parse_slo(args.slo) if args.slo is not None else None
    plan = _plan(args, arrivals, frozenset(shares_of(gates, slo)))
    workers = workers_for(args, arrivals)
    if args.out is not None:
        files.prepare(args.out, args.overwrite)
    scraper = Scraper(args.metrics, token_of(args.token_file)) if args.metrics is not None else None
    progress = ProgressLine(quiet=args.quiet)

    def begin(stage: Arrivals, seconds: float) -> None:
        progress.begin(str(stage), seconds)

    def end(stage: Stage) -> None:
        progress.end()

    if scraper is not None:
        scraper.start()
    try:
        with start_workers(connection, workload, models, workers, args.give_up) as pool:
            runner = Runner(pool, plan, scraper, progress.see, begin, end)
            if slo is not None:
                done = runner.search(arrivals, slo, args.allow_errors, Bounds(args.rate, args.max_rate))
            elif args.sweep is not None:
                done = runner.sweep(arrivals, args.sweep)
            else:
                done = runner.single(arrivals)
    finally:
        if scraper is not None:
            scraper.stop()
    report = _report(args, connection, workload, models, workers, done, gates)
    if args.out is not None:
        files.write(args.out, report, [each.records for each in done.measured])
    print(summary(report), end="")
    if args.out is not None:
        print(f"report: {args.out / 'report.html'}")
    return exit_code(report, args.allow_errors)


def exit_code(report: Report, allowed_errors: float) -> int:
    """Stages of a sweep or a search may overload the server; that is what they are for."""
    if not report.complete or not any(stage.ok for stage in report.stages):
        return REQUESTS_FAILED
    if len(report.stages) == 1 and report.stages[0].failed > allowed_errors * report.stages[0].sent:
        return REQUESTS_FAILED
    if any(gate.failed for gate in report.gates) or (report.search is not None and report.search.rate is None):
        return GATE_FAILED
    return 0


def _plan(args: argparse.Namespace, arrivals: Arrivals, shares: frozenset[float]) -> StagePlan:
    if args.duration == 0:
        raise LoadTestError("--duration is 0: there would be nothing to measure")
    if isinstance(arrivals, Replay):
        # A trace has its own length, and none of it is warm-up.
        length = arrivals.trace[-1] / arrivals.speed + _AFTER_THE_LAST
        return StagePlan(min(args.duration or length, length), 0.0, args.seed, shares)
    warmup = args.warmup if args.warmup is not None else 3.0
    return StagePlan(warmup + (args.duration or 30.0), warmup, args.seed, shares)


def _report(
    args: argparse.Namespace,
    connection: Connection,
    workload: Workload,
    models: tuple[str, ...],
    workers: int,
    run: Run,
    gates: list[Gate],
) -> Report:
    stages = tuple(each.stage for each in run.measured)
    command = shlex.join(["beamline", *sys.argv[1:]])
    return Report(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        title=args.title or f"Load test of {', '.join(filter(None, models)) or connection.target}",
        setup=Setup(
            target=connection.target,
            protocol=f"beamline.v1 {args.method}" if args.protocol == "beamline.v1" else args.protocol,
            models=models,
            workload=str(workload),
            options=tuple(args.options or ()),
            seed=args.seed,
            workers=workers,
            channels=connection.channels,
            deadline=connection.deadline,
            tls=connection.tls is not None,
            token=connection.token_file is not None,
            command=command,
        ),
        machine=Machine(
            system=platform.platform(terse=True),
            cpus=os.cpu_count() or 1,
            python=platform.python_version(),
            beamline=beamline_version(),
        ),
        stages=stages,
        search=run.search,
        gates=tuple(_checked(gates, run)),
        complete=run.complete,
        not_run=tuple(str(each) for each in run.not_run),
    )


def _checked(gates: list[Gate], run: Run) -> list[GateResult]:
    """A search is judged by the stage it found, a sweep by its worst."""
    found_rate = run.search.rate if run.search is not None else None
    stages = [each.stage for each in run.measured]
    if run.search is not None:
        stages = [stages[run.search.stage if run.search.stage is not None else -1]]
    results = []
    for gate in gates:
        checked = [gate.check(stage, found_rate) for stage in stages]
        results.append(next((each for each in checked if each.failed), checked[-1]))
    return results
