"""The `args` of the application in Ray's configuration: the options of `beamline serve`, with underscores.

args:
  repo: s3://models/translation
  max_slots: 16
  models_per_replica: 3       # load models as they are asked for, at most so many in each replica
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from beamline.serving.commands import serve_options
from beamline.serving.config import ServeConfig
from beamline.serving.errors import BeamlineError

_PER_REPLICA = "models_per_replica"
_PORTS = "Ray's proxies have the ports: see `http_options` and `grpc_options` in Ray's configuration"
_ENDING = "Ray ends replicas: see `graceful_shutdown_timeout_s` of the deployment"
_LOGS = "Ray writes the logs: see `logging_config` of the application"
# Options that mean nothing where Ray stands before and behind a replica.
_RAYS = {
    **dict.fromkeys(
        (
            *("host", "grpc_port", "http_port", "metrics_port", "metrics_need_token", "load_reports"),
            *("tls_cert", "tls_key", "tls_client_ca", "max_connections", "max_connections_per_address"),
            *("keepalive_seconds", "max_connection_age"),
        ),
        _PORTS,
    ),
    **dict.fromkeys(("drain_delay", "drain_seconds"), _ENDING),
    **dict.fromkeys(("log_format", "log_level", "access_log"), _LOGS),
}


@dataclass(frozen=True, slots=True)
class Application:
    config: ServeConfig
    models_per_replica: int = 0  # 0: every replica has all models from the start


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BeamlineError(f"the application's args: {message}")


def application(args: Mapping[str, Any]) -> Application:
    """Raises `BeamlineError` with a sentence where they are wrong."""
    given = dict(args)
    count = _count(given.pop(_PER_REPLICA, 0))
    parser = _Parser(prog="args", add_help=False, allow_abbrev=False)
    serve_options.add_arguments(parser)
    options = {action.dest: action for action in parser._actions}
    for name in given:
        if name in _RAYS:
            raise BeamlineError(f"the application's args have {name!r}, which is no option here: {_RAYS[name]}")
        if name not in options:
            allowed = ", ".join(sorted({*options, _PER_REPLICA} - set(_RAYS)))
            raise BeamlineError(f"the application's args have {name!r:.60}; there is {allowed}")
    line = [word for name, value in given.items() for word in _words(options[name], value)]
    config = serve_options.config_of(parser.parse_args(line))
    if count and config.fake:
        raise BeamlineError(f"{_PER_REPLICA} is for the models of a repository: leave `fake` away")
    if config.repository is not None:  # replicas may work in another directory
        config = replace(config, repository=config.repository.absolute())
    return Application(replace(config, on_demand=bool(count)), count)


def _count(value: Any) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = -1
    if count < 0:
        raise BeamlineError(f"{_PER_REPLICA} is {value!r:.60}; it must be a whole number, 0 (all models) or more")
    return count


def _words(action: argparse.Action, value: Any) -> list[str]:
    """An option as it would stand on a command line."""
    option = action.option_strings[-1]
    if isinstance(value, bool) or (action.nargs == 0 and str(value).lower() in ("true", "false")):
        return [option] if str(value).lower() == "true" else []
    values = value if isinstance(value, list | tuple) else [value]
    return [word for each in values for word in (option, str(each))]
