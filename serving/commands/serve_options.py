"""The options of `beamline serve`, and the configuration that they say."""

from __future__ import annotations

import argparse
from pathlib import Path

from beamline.serving.backends.selection import DEVICE_OPTIONS
from beamline.serving.commands.option_types import (
    duration,
    host,
    interval,
    limit,
    none_or_more,
    port,
    positive,
    slowdown,
)
from beamline.serving.config import MIB, ServeConfig, TextLimits
from beamline.serving.errors import BeamlineError
from beamline.serving.models.remote import SCHEMES, cache_folder, is_remote
from beamline.serving.security.tls import TlsFiles
from beamline.serving.telemetry.logs import LEVELS, LogFormat

DEFAULT_REPOSITORY = Path("model_repo")
_WATCH_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config = ServeConfig()
    parser.add_argument(
        "--repo",
        metavar="DIR",
        help=f"the model repository, or one model's folder ({DEFAULT_REPOSITORY}); also s3://, gs://, https:// and oci://",
    )
    parser.add_argument(
        "--model-cache", type=Path, metavar="DIR", help="where models from elsewhere are kept (~/.cache)"
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


def _tls_of(args: argparse.Namespace) -> TlsFiles | None:
    if args.tls_cert is None and args.tls_key is None:
        if args.tls_client_ca is not None:
            raise BeamlineError("--tls-client-ca needs --tls-cert and --tls-key as well")
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise BeamlineError("--tls-cert and --tls-key belong together: give both")
    return TlsFiles(args.tls_cert, args.tls_key, args.tls_client_ca)
