"""What the commands that ask about texts have in common: lines in, answers in order."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TypeVar

from tqdm import tqdm

from beamline.errors import InternalError, InvalidItem
from beamline.serving.commands.connection import add_connection
from beamline.serving.errors import BeamlineError

_BLOCK = 256  # lines that are asked about at once: enough to be sorted by length, few enough that they are seen to move
_CHUNK = 1 << 16  # bytes

Answer = TypeVar("Answer")
Ask = Callable[[list[str]], Sequence[Answer | BeamlineError]]


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", metavar="TEXT", help="default: lines from standard input")
    add_connection(parser)
    parser.add_argument("--file", type=Path, metavar="F", help="read lines from a file")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even without a terminal")


def answers_of(
    args: argparse.Namespace, ask: Ask[Answer], stack: ExitStack
) -> Iterator[tuple[str, Answer | BeamlineError | None]]:
    """Each text with its answer, in order; None for a blank line, which is not asked about, and the refusal where a
    line itself is at fault. Any other failure is raised."""
    if args.text and args.file:
        raise BeamlineError("give texts or --file, not both")
    if args.text:
        if not all(text.strip() for text in args.text):
            raise BeamlineError(
                "a TEXT is empty; give words (an empty line of a file or of standard input stays empty)"
            )
        return _answered(ask, [list(args.text)])
    if args.file is None:
        # A block is what has come meanwhile: who types, or waits in a pipe, has an answer before the next line.
        typing = sys.stdin.isatty()
        return _shown(args, _answered(ask, _blocks(sys.stdin.buffer)), quiet=typing)
    try:
        file = stack.enter_context(args.file.open("rb"))
    except OSError as error:
        raise BeamlineError(f"{args.file} can't be read: {error.strerror}") from error
    return _shown(args, two_at_a_time(ask, _blocks(file)))


def _shown(args: argparse.Namespace, answers: Iterable[Answer], quiet: bool = False) -> Iterator[Answer]:
    return iter(progress(answers, disable=not args.progress and (quiet or not sys.stderr.isatty())))


def progress(answers: Iterable[Answer], *, total: int | None = None, disable: bool) -> Iterable[Answer]:
    return tqdm(answers, total=total, unit=" lines", disable=disable, file=sys.stderr)


def _answered(ask: Ask[Answer], blocks: Iterable[list[str]]) -> Iterator[tuple[str, Answer | BeamlineError | None]]:
    for block in blocks:
        yield from _in_order(block, _asked(ask, block))


def two_at_a_time(ask: Ask[Answer], blocks: Iterable[list[str]]) -> Iterator[tuple[str, Answer | BeamlineError | None]]:
    """The next block is under way before one ends: so its last lines don't leave slots idle."""
    running: deque[tuple[list[str], Future[list[Answer | BeamlineError]]]] = deque()
    pool = ThreadPoolExecutor(2, thread_name_prefix="lines")
    try:
        for block in blocks:
            running.append((block, pool.submit(_asked, ask, block)))
            if len(running) == 2:
                block, future = running.popleft()
                yield from _in_order(block, future.result())
        for block, future in running:
            yield from _in_order(block, future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # closing what is asked ends what still runs


def _asked(ask: Ask[Answer], block: list[str]) -> list[Answer | BeamlineError]:
    texts = [text for text in block if text.strip()]
    return list(ask(texts)) if texts else []


def _in_order(
    block: list[str], answers: Sequence[Answer | BeamlineError]
) -> Iterator[tuple[str, Answer | BeamlineError | None]]:
    rest = iter(answers)
    for text in block:
        answer = next(rest) if text.strip() else None
        if isinstance(answer, BeamlineError) and not isinstance(answer, InvalidItem | InternalError):
            raise answer
        yield text, answer


def answered_or_raised(
    answers: Iterable[tuple[str, Answer | BeamlineError | None]],
) -> Iterator[tuple[str, Answer | None]]:
    for text, answer in answers:
        if isinstance(answer, BeamlineError):
            raise BeamlineError(sentence_of(answer))
        yield text, answer


def sentence_of(failure: BeamlineError) -> str:
    """Of a line, whose place in its list is nobody's concern."""
    sentence = str(failure)
    if not isinstance(failure, InvalidItem):
        return sentence
    rest = sentence.removeprefix(f"item {failure.index}")
    return rest.removeprefix(": ") if rest.startswith(": ") else f"the text{rest}"


def _blocks(stream: BinaryIO) -> Iterator[list[str]]:
    """Lines, as many as there are already and at most `_BLOCK`."""
    rest = b""
    while chunk := stream.read1(_CHUNK):  # type: ignore[attr-defined]
        *lines, rest = (rest + chunk).split(b"\n")
        yield from blocks_of([_text(line) for line in lines])
    if rest:
        yield [_text(rest)]


def blocks_of(lines: Sequence[str]) -> Iterator[list[str]]:
    return (list(lines[first : first + _BLOCK]) for first in range(0, len(lines), _BLOCK))


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise BeamlineError(f"the input is not UTF-8: {error}") from error
