"""Where a client's command finds its server and model, and how it gets in: the same options for all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from beamline.serving.commands.client import Credentials


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="127.0.0.1:8001", metavar="HOST:PORT", help="(%(default)s)")
    parser.add_argument("--model", default="", metavar="M", help="default: the server's only or default model")
    parser.add_argument("--version", default="", metavar="V", help="default: the newest")
    add_credentials(parser)


def add_credentials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-ca", type=Path, metavar="PEM", help="talk TLS, and trust servers of this authority")
    parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="our own certificate, if the server wants one")
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    parser.add_argument("--token-file", type=Path, metavar="F", help="a file that holds a bearer token")


def credentials_of(args: argparse.Namespace) -> Credentials:
    return Credentials(args.tls_ca, args.tls_cert, args.tls_key, args.token_file)


def add_languages(parser: argparse.ArgumentParser) -> None:
    what = "for a model that knows several: as its checkpoint writes it, or as BCP-47 does"
    parser.add_argument("--source-language", default="", metavar="CODE", help=what)
    parser.add_argument("--target-language", default="", metavar="CODE", help="the same")


def languages_of(args: argparse.Namespace) -> dict[str, str]:
    return {"source_language": args.source_language, "target_language": args.target_language}
