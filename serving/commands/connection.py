"""Where a command finds the model that it asks: at a server, or in this process. The same options for all of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamline._channel import read_token
from beamline.client import Client
from beamline.serving.errors import BeamlineError
from beamline.serving.models.repository import scan
from beamline.serving.models.settings import read_settings

if TYPE_CHECKING:
    from beamline.in_process import LoadedModel


def add_connection(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "where the server is (default: BEAMLINE_TARGET, else 127.0.0.1:8001)")
    parser.add_argument("--repo", type=Path, metavar="DIR", help="no server: load the model from here, for this once")
    parser.add_argument(
        "--model", default="", metavar="M", help="default: the only or the default one that can do this"
    )
    parser.add_argument("--version", default="", metavar="V", help="default: the newest")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="seconds for an answer, or for each 256 lines (default: no limit)"
    )


def add_target(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--target", metavar="HOST:PORT", help=text)
    parser.add_argument("--tls", action="store_true", help="talk TLS, and trust the public authorities")
    parser.add_argument("--tls-ca", type=Path, metavar="PEM", help="talk TLS, and trust servers of this authority")
    parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="our own certificate, if the server wants one")
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    parser.add_argument("--token-file", type=Path, metavar="F", help="a file that holds a bearer token")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be seconds, more than 0")
    return seconds


def model_of(args: argparse.Namespace) -> Client | LoadedModel:
    """What is asked: both have the same methods. To be closed."""
    if args.repo is None:
        return Client(**connection_of(args), timeout=args.timeout)
    if args.target is not None:
        raise BeamlineError("give --target or --repo, not both")
    from beamline.in_process import load  # only here: a client needs no runtime

    if args.version and not args.version.isdecimal():
        raise BeamlineError(f"--version is {args.version!r}; it must be a whole number")
    return load(
        _folder(args.repo, args.model), version=int(args.version) if args.version else None, timeout=args.timeout
    )


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a method that say which model; a loaded one is known."""
    if args.repo is not None:
        return {}
    return {name: value for name in ("model", "version") if (value := getattr(args, name))}


def connection_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `beamline.Client`."""
    if not args.tls and args.tls_ca is None and (args.tls_cert is not None or args.tls_key is not None):
        raise BeamlineError("--tls-cert and --tls-key need --tls or --tls-ca as well")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise BeamlineError("--tls-cert and --tls-key belong together: give both")
    return {
        "target": args.target,
        "token": None if args.token_file is None else read_token(args.token_file),
        "tls": args.tls_ca or (True if args.tls else None),
        "client_cert": args.tls_cert,
        "client_key": args.tls_key,
    }


def _folder(repository: Path, name: str) -> Path:
    """Of the model that is named, else of the default one, else of the only one."""
    found = scan(repository)
    folders = found.folders
    if name:
        return folders.get(name, repository / name)
    if not found.models:
        why = f" ({found.problems[0].reason})" if found.problems else ""
        raise BeamlineError(f"{repository} holds no models that can be loaded{why}")
    defaults = [folder for folder in folders.values() if len(folders) > 1 and read_settings(folder).default]
    if len(defaults or folders) != 1:
        raise BeamlineError(f"{repository} has several models: name one with --model, of {', '.join(folders)}")
    return (defaults or list(folders.values()))[0]


def add_languages(parser: argparse.ArgumentParser) -> None:
    what = "for a model that knows several: as its checkpoint writes it, or as BCP-47 does"
    parser.add_argument("--source-language", default="", metavar="CODE", help=what)
    parser.add_argument("--target-language", default="", metavar="CODE", help="the same")


def languages_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a method that say which languages."""
    return {name: value for name in ("source_language", "target_language") if (value := getattr(args, name))}
