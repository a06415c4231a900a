"""The command line of `beamline loadtest`, and the connection, arrivals and workload that it describes."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from beamline._channel import DEFAULT_TARGET, TARGET_VARIABLE
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.arrivals import Arrivals, Bursty, ClosedLoop, Constant, Poisson, Replay
from beamline.loadtest.load.texts import (
    LONGEST,
    SENTENCES,
    FileTexts,
    Fixed,
    Lengths,
    Lognormal,
    SyntheticTexts,
    Uniform,
    read_lines,
)
from beamline.loadtest.load.trace import read_trace
from beamline.loadtest.load.workload import Mix, MixedWorkload, Workload, only
from beamline.loadtest.quantities import parse_duration, parse_rate, parse_share
from beamline.loadtest.targets.beamline_v1 import METHODS
from beamline.loadtest.targets.protocols import BEAMLINE, OPEN_INFERENCE, TARGETS
from beamline.loadtest.targets.target import Connection, Options, Tls

_PER_WORKER = 1500.0  # requests per second that one process sends without strain
_CLIENTS_PER_WORKER = 128

T = TypeVar("T")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("the server")
    usual = os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET
    where.add_argument(
        "--target", default=usual, metavar="HOST:PORT", help=f"({TARGET_VARIABLE}, else {DEFAULT_TARGET})"
    )
    where.add_argument(
        "--protocol",
        choices=tuple(TARGETS),
        default=BEAMLINE,
        help="open-inference measures Triton and other KServe servers as well (%(default)s)",
    )
    where.add_argument("--input", metavar="NAME", help="open-inference: the BYTES tensor that takes the text")
    where.add_argument("--stream", action="store_true", help="open-inference: ModelStreamInfer, every response timed")
    where.add_argument(
        "--model",
        action="append",
        metavar="[W:]M[/V]",
        help="several share the load by their weights, as 3:en-de 1:en-fr (default: the server's)",
    )
    where.add_argument("--deadline", type=_duration, default=30.0, metavar="T", help="of a request (30s)")
    where.add_argument("--connect-timeout", type=_duration, default=10.0, metavar="T", help="(10s)")
    where.add_argument("--metrics", metavar="HOST:PORT", help="read the server's /metrics during the run")
    where.add_argument("--tls", action="store_true", help="with the system's authorities, unless --tls-ca")
    where.add_argument("--tls-ca", type=Path, metavar="F", help="certificates to trust (PEM)")
    where.add_argument("--tls-cert", type=Path, metavar="F", help="the client's own certificate")
    where.add_argument("--tls-key", type=Path, metavar="F", help="its key")
    where.add_argument("--tls-name", metavar="HOST", help="the name in the server's certificate")
    where.add_argument(
        "--token-file", type=Path, metavar="F", help="sent as a bearer token; no argument: ps shows those"
    )

    when = parser.add_argument_group("when requests are sent")
    when.add_argument("--rate", type=_rate, default=10.0, metavar="R", help="per second, in the mean (10)")
    when.add_argument("--arrivals", choices=("poisson", "constant", "bursty"), default="poisson", help="(%(default)s)")
    when.add_argument("--burst", type=_burst, default=(1.0, 4.0), metavar="ON,OFF", help="of bursty arrivals (1s,4s)")
    when.add_argument("--clients", type=_count, metavar="N", help="a closed loop: each waits for its answer")
    when.add_argument("--think", type=_duration, default=0.0, metavar="T", help="between answer and question (0)")
    when.add_argument("--trace", type=Path, metavar="F", help='JSON lines with "time", "text", "model", "options"')
    when.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="of the trace (1)")
    when.add_argument("--duration", type=_duration, metavar="T", help="measured, of a stage (30s; a trace's own)")
    when.add_argument("--warmup", type=_duration, metavar="T", help="sent before, not measured (3s; none of a trace)")
    when.add_argument("--sweep", type=_rates, metavar="R,R,...", help="one stage for each rate")
    when.add_argument("--slo", metavar="p95=500ms", help="search for the highest rate that holds this, from --rate up")
    when.add_argument("--max-rate", type=_rate, default=100_000.0, metavar="R", help="of the search (100000)")

    what = parser.add_argument_group("what is sent")
    what.add_argument(
        "--method",
        choices=tuple(METHODS),
        default="translate",
        help="the last two answer in pieces: time to the first one, and gaps between them (%(default)s)",
    )
    what.add_argument("--texts", type=Path, metavar="F", help="one per line, in random order")
    what.add_argument("--sentences", action="store_true", help="English ones that are shipped with this tool")
    what.add_argument(
        "--lengths",
        type=_lengths,
        default=Lognormal(80, 0.5),
        metavar="D",
        help="characters of synthetic texts: fixed:N, uniform:A:B or lognormal:MEDIAN:SIGMA (lognormal:80:0.5)",
    )
    what.add_argument("--distinct", type=_count, metavar="N", help="only so many different texts (default: all differ)")
    what.add_argument(
        "--options",
        action="append",
        metavar="[W:]K=V,...",
        help="decoding options; several share the load by their weights, as 3:beam_size=1 1:beam_size=4",
    )
    what.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed, the same requests (0)")

    how = parser.add_argument_group("the load tester itself")
    how.add_argument("--workers", type=_count, metavar="N", help="processes (default: by rate and cores)")
    how.add_argument("--channels", type=_count, default=2, metavar="N", help="connections of each (%(default)s)")
    how.add_argument("--give-up", type=_duration, default=10.0, metavar="T", help="with nothing but failures (10s)")

    result = parser.add_argument_group("the result")
    result.add_argument("--out", type=Path, metavar="DIR", help="for report.json, .html and .md, and requests.csv")
    result.add_argument("--overwrite", action="store_true", help="the report that --out already holds")
    result.add_argument("--title", metavar="TEXT", help="of the report")
    result.add_argument("--fail-if", action="append", default=[], metavar='"p95>500ms"', help="exit with 1 then")
    result.add_argument(
        "--allow-errors", type=_share, default=0.0, metavar="P", help="as 1%%; exit with 3 above it (0)"
    )
    result.add_argument("--quiet", action="store_true", help="no live view")


def connection_of(args: argparse.Namespace) -> Connection:
    tls = None
    if args.tls or args.tls_ca or args.tls_cert or args.tls_key or args.tls_name:
        if (args.tls_cert is None) != (args.tls_key is None):
            raise LoadTestError("--tls-cert and --tls-key go together")
        tls = Tls(args.tls_ca, args.tls_cert, args.tls_key, args.tls_name)
    if ":" not in args.target:
        raise LoadTestError(f"--target is {args.target!r}; write HOST:PORT")
    if args.protocol != OPEN_INFERENCE and (args.stream or args.input is not None):
        raise LoadTestError("--stream and --input belong to --protocol open-inference")
    return Connection(
        target=args.target,
        protocol=args.protocol,
        stream=args.stream,
        input_name=args.input,
        channels=args.channels,
        deadline=args.deadline,
        connect_timeout=args.connect_timeout,
        tls=tls,
        token_file=args.token_file,
        method=args.method,
    )


def load_of(args: argparse.Namespace) -> tuple[Arrivals, Workload, tuple[str, ...]]:
    """The arrivals, the requests, and the models that they are for."""
    if sum(map(bool, (args.clients, args.trace, args.sweep, args.slo))) > 1:
        raise LoadTestError("--clients, --trace, --sweep and --slo exclude each other")
    models = _mix(args.model, str) if args.model else only("")
    if args.trace is not None:
        if len(models.choices) > 1 or args.options or args.texts or args.sentences:
            raise LoadTestError(
                "a trace says itself what is sent: give no --options, --texts or --sentences, and one --model at most"
            )
        replay, workload = read_trace(args.trace, models.choices[0], args.speed)
        for request in workload.kinds():
            _check(request.options, args)
        return replay, workload, tuple(sorted({each.model for each in workload.requests}))
    options = _mix(args.options or [""], lambda text: _decoding(text, args))
    return _arrivals(args), MixedWorkload(_texts(args), models, options, args.seed), models.choices


def workers_for(args: argparse.Namespace, arrivals: Arrivals) -> int:
    """Worker processes; more than are needed would only compete for cores."""
    if args.workers is not None:
        return int(args.workers)
    cores = len(os.sched_getaffinity(0))
    if isinstance(arrivals, ClosedLoop):
        return min(cores, math.ceil(arrivals.clients / _CLIENTS_PER_WORKER))
    if args.slo is not None:
        return cores
    highest: float = max(args.sweep) if args.sweep else args.rate
    if isinstance(arrivals, Replay):
        highest = len(arrivals.trace) * arrivals.speed / max(arrivals.trace[-1], 1.0)
    return max(min(cores, math.ceil(highest / _PER_WORKER)), 1)


def _arrivals(args: argparse.Namespace) -> Arrivals:
    if args.clients is not None:
        return ClosedLoop(args.clients, args.think)
    if args.arrivals == "constant":
        return Constant(args.rate)
    if args.arrivals == "bursty":
        return Bursty(args.rate, *args.burst)
    return Poisson(args.rate)


def _texts(args: argparse.Namespace) -> FileTexts | SyntheticTexts:
    if args.sentences:
        if args.texts is not None:
            raise LoadTestError("--texts and --sentences exclude each other")
        return FileTexts(read_lines(SENTENCES)[: args.distinct], args.seed, "shipped English sentences")
    if args.texts is not None:
        return FileTexts(read_lines(args.texts)[: args.distinct], args.seed)
    return SyntheticTexts(args.lengths, args.seed, args.distinct)


def _mix(texts: Sequence[str], parse: Callable[[str], T]) -> Mix[T]:
    """`3:this` is three times as frequent as `that`."""
    choices, weights = [], []
    for text in texts:
        weight, colon, rest = text.partition(":")
        try:
            number = float(weight) if colon else 1.0
        except ValueError:
            number, rest = 1.0, text  # a colon of its own, as in a model's name
        if not 0 < number < math.inf:
            raise LoadTestError(f"{text!r}: a weight must be greater than 0")
        choices.append(parse(rest if colon else text))
        weights.append(number)
    return Mix(tuple(choices), tuple(weights))


def _decoding(text: str, args: argparse.Namespace) -> Options:
    pairs = [part.partition("=") for part in text.split(",") if part]
    options = tuple((name.strip(), value.strip()) for name, _, value in pairs)
    _check(options, args)
    return options


def _check(options: Options, args: argparse.Namespace) -> None:
    """A wrong option is reported at once; those of another protocol only its server knows."""
    if args.protocol == BEAMLINE:
        METHODS[args.method].options(options)


def _lengths(text: str) -> Lengths:
    kind, *numbers = text.split(":")
    try:
        if kind == "fixed" and 1 <= int(numbers[0]) <= LONGEST and len(numbers) == 1:
            return Fixed(int(numbers[0]))
        if kind == "uniform" and 1 <= int(numbers[0]) <= int(numbers[1]) <= LONGEST and len(numbers) == 2:
            return Uniform(int(numbers[0]), int(numbers[1]))
        if kind == "lognormal" and float(numbers[0]) >= 1 and 0 <= float(numbers[1]) <= 3 and len(numbers) == 2:
            return Lognormal(float(numbers[0]), float(numbers[1]))
    except (ValueError, IndexError):
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r}: write fixed:N, uniform:A:B or lognormal:MEDIAN:SIGMA, with up to {LONGEST} characters"
    )


def _read(parse: Callable[[str], float], text: str) -> float:
    """Our own sentence: argparse would name the function that failed."""
    try:
        return parse(text)
    except LoadTestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    return _read(parse_duration, text)


def _rate(text: str) -> float:
    value = _read(parse_rate, text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be greater than 0")
    return value


def _rates(text: str) -> list[float]:
    return [_rate(part) for part in text.split(",")]


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed; write a number greater than 0, as 2 or 0.5")
    return value


def _burst(text: str) -> tuple[float, float]:
    on, _, off = text.partition(",")
    found = _duration(on), _duration(off)
    if found[0] <= 0:
        raise argparse.ArgumentTypeError(f"{text}: a burst must last")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write a whole number from 1 on")
    return int(text)


def _share(text: str) -> float:
    return _read(parse_share, text)
