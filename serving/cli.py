"""The command `beamline`.

Subcommands are modules that register under the entry points `beamline.commands`, so that this package names
none that it does not own. Such a module has

    HELP: str
    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...

Only the subcommand that is called is imported: `beamline translate` does not wait for torch.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Protocol, cast

from beamline.serving.errors import BeamlineError
from beamline.version import beamline_version, needed

GROUP = "beamline.commands"
FAILED = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no whole number; write it in digits, as 4") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no number; write it in digits, as 4 or 0.5") from None


# What reads an argument of these types: argparse's own words are "invalid int value".
_NUMBERS = {int: _whole_number, float: _number}


class Command(Protocol):
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


Loader = Callable[[], Command]


def installed_commands() -> dict[str, Loader]:
    points = metadata.entry_points(group=GROUP)
    return {point.name: cast("Loader", point.load) for point in sorted(points, key=lambda each: each.name)}


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Loader] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = installed_commands() if commands is None else commands
    try:
        if not arguments or arguments[0] not in known:
            return _overview(arguments, known)
        code = _call(arguments[0], known[arguments[0]], arguments[1:])
        sys.stdout.flush()  # here, where a closed pipe is understood, rather than at exit
        return code
    except BeamlineError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # `beamline translate | head`: the reader has enough. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        where = f" for {error.filename}" if error.filename else ""
        return _fail(f"there is no space left{where} ({error.strerror}): make some, and try again")
    except KeyboardInterrupt:
        return INTERRUPTED


def _call(name: str, load: Loader, arguments: list[str]) -> int:
    try:
        command = load()
        parser = argparse.ArgumentParser(prog=f"beamline {name}", description=command.HELP)
        for kind, read in _NUMBERS.items():
            parser.register("type", kind, read)
        command.add_arguments(parser)
        return command.run(parser.parse_args(arguments))
    except ModuleNotFoundError as error:
        advice = needed(error)
        if advice is None:
            raise
        return _fail(f"beamline {name} {advice}")


def _overview(arguments: list[str], known: Mapping[str, Loader]) -> int:
    """Help, `--version`, or a word that is no command."""
    parser = argparse.ArgumentParser(prog="beamline", description="An inference server for sequence models.")
    parser.add_argument("--version", action="version", version=f"beamline {beamline_version()}")
    choices = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, load in known.items():
        choices.add_parser(name, help=_help(load), add_help=False)
    parser.parse_args(arguments)
    parser.print_help()
    return 0 if arguments else FAILED


def _help(load: Loader) -> str:
    try:
        return load().HELP
    except ModuleNotFoundError as error:
        return needed(error) or f"can't be loaded: {error}"


def _fail(message: str) -> int:
    print(f"beamline: {message}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
