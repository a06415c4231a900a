"""`beamline serve`: a model repository behind gRPC."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from beamline.serving.backends.selection import DEVICE_OPTIONS
from beamline.serving.config import MIB, ServeConfig, TextLimits
from beamline.serving.errors import BeamlineError
from beamline.serving.models.remote import SCHEMES, cache_folder, is_remote
from beamline.serving.models.settings import MOST_SLOWDOWN
from beamline.serving.security.tls import TlsFiles
from beamline.serving.server import Server
from beamline.serving.telemetry.logs import LEVELS, LogFormat, configure

HELP = "serve the models of a repository over gRPC"

log = logging.getLogger(__name__)

DEFAULT_REPOSITORY = Path("model_repo")
_WATCH_SECONDS = 2.0
_STOP_SECONDS = 5.0  # to end in good order, behind the drain
FAILED = 1  # the exit code for a supervisor, where an engine failed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config = ServeConfig()
    parser.add_argument(
        "--repo",
        metavar="DIR",
        help=f"the model repository, or one model's folder ({DEFAULT_REPOSITORY}); also s3://, gs:// and https://",
    )
    parser.add_argument(
        "--model-cache", type=Path, metavar="DIR", help="where models from s3://, gs:// or https:// are kept (~/.cache)"
    )
    parser.add_argument("--model-name", metavar="M", help="serve the only model under this name (its own)")
    parser.add_argument(
        "--load", action="append", metavar="M[/V]", help="begin with this model only, or this version (default: all)"
    )
    parser.add_argument(
        "--watch",
        type=interval,
        nargs="?",
        const=_WATCH_SECONDS,
        metavar="S",
        help=f"follow changes in the repository, looking every S seconds ({_WATCH_SECONDS:g})",
    )
    parser.add_argument(
        "--load-seconds",
        type=limit,
        default=config.load_seconds,
        metavar="S",
        help="give up loading a model that takes longer; none: never (%(default)s)",
    )
    parser.add_argument("--host", type=host, default=config.host, help="address to listen on (%(default)s)")
    parser.add_argument("--grpc-port", type=port, default=config.grpc_port, help="0: any (%(default)s)")
    parser.add_argument("--http-port", type=port, default=8000, help="of the JSON gateway; 0: any (%(default)s)")
    parser.add_argument("--metrics-port", type=port, default=config.metrics_port, help="0: any (%(default)s)")
    parser.add_argument(
        "--device", choices=DEVICE_OPTIONS, default=config.device, help="what runs the models (%(default)s)"
    )
    parser.add_argument("--threads", type=positive, default=0, metavar="N", help="of a model (default: every core)")
    parser.add_argument(
        "--engines",
        type=positive,
        default=0,
        metavar="N",
        help="that share a model's threads on the CPU (default: several for a small model, one for a larger one)",
    )
    parser.add_argument(
        "--max-slots",
        type=positive,
        default=config.max_slots,
        metavar="N",
        help="decoded at once (%(default)s)",
    )
    parser.add_argument(
        "--max-queue",
        type=positive,
        default=config.max_queue,
        metavar="N",
        help="waiting at most (%(default)s)",
    )
    parser.add_argument(
        "--max-texts", type=positive, default=config.text.max_inputs, metavar="N", help="of one call (%(default)s)"
    )
    parser.add_argument(
        "--max-message-mib", type=positive, default=config.max_message_bytes // MIB, metavar="N", help="(%(default)s)"
    )
    parser.add_argument(
        "--max-pending-mib",
        type=positive,
        default=config.max_pending_bytes // MIB,
        metavar="N",
        help="of requests above 2 KiB that are here at once; more are refused (%(default)s)",
    )
    parser.add_argument(
        "--no-early-refusal", action="store_true", help="let requests wait whose deadline will pass meanwhile"
    )
    parser.add_argument(
        "--prefix-cache-mib",
        type=none_or_more,
        default=config.prefix_cache_bytes // MIB,
        metavar="N",
        help="prompts that a language model remembers; 0: none (%(default)s)",
    )
    parser.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let holders of different tokens use each other's prompts; each can see then what others have sent",
    )
    parser.add_argument(
        "--prompt-slowdown",
        type=slowdown,
        default=config.prompt_slowdown,
        metavar="X",
        help="how many times as long running streams may wait for a token while prompts are taken in (%(default)s)",
    )
    parser.add_argument("--default-model", metavar="M", help="for calls that name none")
    parser.add_argument("--all-versions", action="store_true", help="not only the newest of each model")
    parser.add_argument(
        "--drain-delay",
        type=duration,
        default=config.drain_delay_seconds,
        metavar="S",
        help="after SIGTERM, fail health checks for so long before calls are refused; not after Ctrl-C (%(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=limit,
        default=config.drain_seconds,
        metavar="S",
        help="after SIGTERM, cut off calls that still run then; none: wait as long as they take (%(default)s)",
    )
    parser.add_argument(
        "--write-seconds",
        type=limit,
        default=config.write_seconds,
        metavar="S",
        help="give up a call whose client takes nothing for so long; none: never (%(default)s)",
    )
    parser.add_argument(
        "--watchdog-seconds",
        type=interval,
        default=config.watchdog_seconds,
        metavar="S",
        help="end with an error where a step takes longer: a device that hangs (%(default)s)",
    )
    parser.add_argument(
        "--max-connections",
        type=positive,
        metavar="N",
        help="open at once over gRPC, and over HTTP (as many as the limit of open files allows)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=positive,
        metavar="N",
        help="over HTTP; behind a proxy all clients have one address (no limit)",
    )
    parser.add_argument(
        "--keepalive-seconds",
        type=interval,
        default=config.keepalive_seconds,
        metavar="S",
        help="ping gRPC clients that have been silent for so long; who does not answer in 20 s is gone (%(default)s)",
    )
    parser.add_argument(
        "--max-connection-age",
        type=interval,
        metavar="S",
        help="close gRPC connections that are older, so that clients balance anew (never)",
    )
    parser.add_argument(
        "--load-reports",
        action="store_true",
        help="tell load balancers with every answer how busy this server is (ORCA; see docs/balancing.md)",
    )
    _add_security(parser)
    parser.add_argument(
        "--log-format",
        choices=[form.value for form in LogFormat],
        default="text",
        help="on standard error (%(default)s)",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="(%(default)s)")
    parser.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        help="a line for every call (default: with --log-format json)",
    )
    parser.add_argument("--fake", action="store_true", help="serve an echo with an exact delay instead of a repository")
    parser.add_argument("--fake-step-ms", type=duration, default=0.0, metavar="X", help="(%(default)s)")
    parser.add_argument("--fake-slots", type=positive, default=config.fake_slots, metavar="N", help="(%(default)s)")


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("security", "files are read again when they change; see docs/operations.md")
    group.add_argument("--tls-cert", type=Path, metavar="PEM", help="the server's certificate and its chain")
    group.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    group.add_argument("--tls-client-ca", type=Path, metavar="PEM", help="clients must show a certificate of this one")
    group.add_argument("--tokens", type=Path, metavar="TOML", help="bearer tokens, made by 'beamline token'")
    group.add_argument("--metrics-need-token", action="store_true", help="for /metrics too, not only for calls")
    group.add_argument(
        "--max-calls-per-client", type=positive, metavar="N", help="of one client at once (default: no limit)"
    )


def _tls_of(args: argparse.Namespace) -> TlsFiles | None:
    if args.tls_cert is None and args.tls_key is None:
        if args.tls_client_ca is not None:
            raise BeamlineError("--tls-client-ca needs --tls-cert and --tls-key as well")
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise BeamlineError("--tls-cert and --tls-key belong together: give both")
    return TlsFiles(args.tls_cert, args.tls_key, args.tls_client_ca)


def _whole(text: str, lowest: int, highest: int | None = None) -> int:
    allowed = f"a whole number from {lowest} on" if highest is None else f"a whole number from {lowest} to {highest}"
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be {allowed}") from None
    if value < lowest or (highest is not None and value > highest):
        raise argparse.ArgumentTypeError(f"it is {value}; it must be {allowed}")
    return value


def _real(text: str, lowest: float, highest: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be {what}") from None
    if not lowest <= value <= highest:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be {what}")
    return value


def port(text: str) -> int:
    return _whole(text, 0, 65535)


def positive(text: str) -> int:
    return _whole(text, 1)


def none_or_more(text: str) -> int:
    return _whole(text, 0)


def host(text: str) -> str:
    name, colon, number = text.rpartition(":")
    if colon and number.isdigit() and ":" not in name:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be an address without a port: --host {name}")
    return text.strip("[]")


def slowdown(text: str) -> float:
    return _real(text, 1, MOST_SLOWDOWN, f"a number from 1 to {MOST_SLOWDOWN:g}")


def duration(text: str) -> float:
    return _real(text, 0, sys.float_info.max, "a number, 0 or more")


def limit(text: str) -> float | None:
    if text == "none":
        return None
    return _real(text, 0, sys.float_info.max, "a number of seconds, or none")


def interval(text: str) -> float:
    return _real(text, 0.05, sys.float_info.max, "a number of seconds, at least 0.05")


def _repository_of(args: argparse.Namespace) -> tuple[Path | None, str | None]:
    """The folder, and the address of which it is a copy."""
    if args.repo is None:
        return None, None
    given = str(args.repo)
    if is_remote(given):
        return cache_folder(given, args.model_cache), given
    if "://" in given:
        allowed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise BeamlineError(f"--repo is {given!r}; it must be a folder, or begin with one of {allowed}")
    return Path(given), None


def config_of(args: argparse.Namespace) -> ServeConfig:
    repository, remote = _repository_of(args)
    if args.fake and (repository is not None or args.load or args.watch is not None or args.model_name):
        raise BeamlineError(
            "--fake serves an echo and no repository: leave --repo, --model-name, --load and --watch away"
        )
    if repository is None and not args.fake:
        repository = DEFAULT_REPOSITORY
        if not repository.is_dir():
            raise BeamlineError(
                f"there is nothing to serve: no folder {repository} is here; give --repo DIR (or --fake)"
            )
    return ServeConfig(
        repository=repository,
        remote=remote,
        model_name=args.model_name or None,
        fake=args.fake,
        host=args.host,
        grpc_port=args.grpc_port,
        http_port=args.http_port,
        metrics_port=args.metrics_port,
        metrics_need_token=args.metrics_need_token,
        default_model=args.default_model,
        all_versions=args.all_versions,
        load=tuple(args.load or ()),
        load_seconds=args.load_seconds,
        watch_seconds=args.watch,
        write_seconds=args.write_seconds,
        drain_delay_seconds=args.drain_delay,
        drain_seconds=args.drain_seconds,
        max_connections=args.max_connections,
        max_connections_per_address=args.max_connections_per_address,
        keepalive_seconds=args.keepalive_seconds,
        max_connection_seconds=args.max_connection_age,
        load_reports=args.load_reports,
        watchdog_seconds=args.watchdog_seconds,
        device=args.device,
        threads=args.threads,
        engines=args.engines,
        max_slots=args.max_slots,
        max_queue=args.max_queue,
        share_prefix_cache=args.share_prefix_cache,
        prefix_cache_bytes=args.prefix_cache_mib * MIB,
        prompt_slowdown=args.prompt_slowdown,
        fake_step_seconds=args.fake_step_ms / 1000,
        fake_slots=args.fake_slots,
        early_refusal=not args.no_early_refusal,
        max_pending_bytes=args.max_pending_mib * MIB,
        max_message_bytes=args.max_message_mib * MIB,
        text=TextLimits(max_inputs=args.max_texts),
        tls=_tls_of(args),
        tokens=args.tokens,
        max_calls_per_client=args.max_calls_per_client,
    )


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    form = LogFormat(args.log_format)
    configure(form, args.log_level, form is LogFormat.JSON if args.access_log is None else args.access_log)
    _warn(config)
    return asyncio.run(_serve(config))


def _warn(config: ServeConfig) -> None:
    local = config.host in ("localhost", "::1") or config.host.startswith("127.")
    protected = config.tokens is not None or (config.tls is not None and config.tls.client_ca is not None)
    if not local and not protected:
        log.warning("whoever reaches %s may call, load and unload: see --tokens and --tls-client-ca", config.host)
    if config.tokens is not None and config.tls is None and not local:
        log.warning("tokens travel unencrypted to %s: see --tls-cert, unless something else encrypts", config.host)


async def _serve(config: ServeConfig) -> int:
    stop = _Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    server = Server(config)
    # The usual request to look again; by default it would end the process.
    loop.add_signal_handler(signal.SIGHUP, server.look_again)
    if not await _started(server, stop.asked):
        return 0
    # One line for programs, with the ports as their options name them; everything else goes to standard error.
    ready = f"ready grpc={server.grpc_address} http={server.http_address} metrics={server.metrics_address}"
    print(ready, flush=True)
    if await _ended_by_failure(server, stop.asked):
        _exit_after(_STOP_SECONDS)  # what hangs would keep the process
        await server.answer_failed()
        await server.stop()
        return FAILED
    if stop.by_supervisor and config.drain_delay_seconds:
        log.info("leaving: health checks say no, calls are answered for %s seconds more", config.drain_delay_seconds)
        await server.leave()
    log.info("draining: no new calls, finishing those that run (again to stop at once)")
    if config.drain_seconds is not None:
        _exit_after(config.drain_seconds + _STOP_SECONDS)
    drained = await server.drain()
    await server.stop()
    if not drained:
        log.error("stopped with calls unfinished after %s seconds", config.drain_seconds)
    return 0 if drained else 1


async def _started(server: Server, stop: asyncio.Event) -> bool:
    """False where it was asked to end before: a model may take long to load, or hang."""
    starting, asked = asyncio.create_task(server.start()), asyncio.create_task(stop.wait())
    await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if starting.done():
        starting.result()
        return True
    log.info("ending before all models are loaded")
    _exit_after(_STOP_SECONDS)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    return False


async def _ended_by_failure(server: Server, stop: asyncio.Event) -> bool:
    """Waits for the end: asked for, or because engines don't step any more."""
    waits = [asyncio.create_task(event.wait()) for event in (stop, server.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    return server.failed.is_set() and not stop.is_set()


def _exit_after(seconds: float) -> None:
    """The last resort: a step that hangs in a device's driver, say, would keep the process for ever."""

    def exit_now() -> None:
        log.error("still not stopped after %s seconds: exiting at once", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()


class _Stop:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.by_supervisor = False  # by one that may run load balancers, and not by a person at a terminal

    def on_signal(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)
        self.by_supervisor = number == signal.SIGTERM
        self.asked.set()
