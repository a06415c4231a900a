"""`beamline eval`: how good a model's translations are, against references."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from beamline.protos import beamline_pb2 as pb
from beamline.serving.commands.client import FILE_BLOCK, FILE_WINDOW, CallFailed, Client
from beamline.serving.commands.connection import add_connection, add_languages, credentials_of, languages_of
from beamline.serving.config import ServeConfig
from beamline.serving.errors import BeamlineError
from beamline.version import install_hint

HELP = "measure translation quality (BLEU, chrF) against references"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, metavar="F", help="the lines to translate")
    parser.add_argument("--reference", type=Path, required=True, metavar="F", help="their translations, line by line")
    parser.add_argument("--repo", type=Path, metavar="DIR", help="serve this repository for the occasion")
    parser.add_argument("--beam", type=int, metavar="N", help="beam size (default: the model's)")
    parser.add_argument("--output", type=Path, metavar="F", help="write the translations there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_languages(parser)
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    bleu, chrf = _metrics()
    sources, references = _lines(args.source), _lines(args.reference)
    if len(sources) != len(references):
        raise BeamlineError(
            f"{args.source} has {len(sources)} lines and {args.reference} has {len(references)}; they must go together"
        )
    if not sources:
        raise BeamlineError(f"{args.source} is empty")
    with _server(args) as target:
        began = time.monotonic()
        translations, refused = _translate(args, target, sources)
        seconds = time.monotonic() - began
    if args.output is not None:
        args.output.write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    scores = [metric.corpus_score(translations, [references]) for metric in (bleu, chrf)]
    found = {
        "lines": len(sources),
        "refused": refused,
        "bleu": round(scores[0].score, 2),
        "chrf": round(scores[1].score, 2),
        "seconds": round(seconds, 2),
        "signatures": [str(metric.get_signature()) for metric in (bleu, chrf)],
    }
    print(json.dumps(found) if args.json else _table(found))
    return 0


def _table(found: dict[str, Any]) -> str:
    refused = f", {found['refused']} of them refused and counted as empty" if found["refused"] else ""
    return "\n".join(
        [
            f"BLEU  {found['bleu']:.2f}  ({found['signatures'][0]})",
            f"chrF  {found['chrf']:.2f}  ({found['signatures'][1]})",
            f"{found['lines']} lines in {found['seconds']:.1f} s, {found['lines'] / found['seconds']:.1f}/s{refused}",
        ]
    )


def _metrics() -> tuple[Any, Any]:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise BeamlineError(f"this needs sacrebleu: {install_hint('eval')}") from None
    return BLEU(), CHRF()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BeamlineError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BeamlineError(f"{path} is not UTF-8: {error}") from error


def _translate(args: argparse.Namespace, target: str, sources: Sequence[str]) -> tuple[list[str], int]:
    def question(line: str) -> pb.TranslateRequest:
        options = pb.DecodingOptions(split_sentences=True)
        if args.beam is not None:
            options.beam_size = args.beam
        return pb.TranslateRequest(
            model=args.model, version=args.version, inputs=[pb.Input(text=line)], options=options, **languages_of(args)
        )

    translations: list[str] = []
    refused = 0
    with Client(target, FILE_WINDOW, credentials_of(args), block=FILE_BLOCK) as client:
        answers = client.translate(sources, question)
        bar = tqdm(answers, total=len(sources), unit=" lines", disable=not sys.stderr.isatty(), file=sys.stderr)
        for number, answer in enumerate(bar, 1):
            if isinstance(answer, CallFailed):
                refused += 1
                tqdm.write(f"line {number}: {answer}", file=sys.stderr)
            translations.append(answer.hypotheses[0].text if isinstance(answer, pb.Translation) else "")
    return translations, refused


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The server to ask: the one that was named, or one of our own in this process, on any free port."""
    if args.repo is None:
        yield args.target
        return
    from beamline.serving.server import Server  # only here: a client needs no runtime

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    async def start() -> Server:
        server = Server(ServeConfig(repository=args.repo, grpc_port=0, metrics_port=0))
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.grpc_address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
