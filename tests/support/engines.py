"""Driving an engine without a thread: submit, step until it is idle, collect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.backends.onnxruntime import OnnxRuntimeBackend
from serving.engine.core import Engine
from serving.engine.plan import Plan
from serving.engine.request import DecodingOptions, Request, Result, Source
from serving.manifest import Manifest

Answer = Result | Exception


def make_engine(folder: Path, manifest: Manifest, slots: int = 16) -> Engine:
    return Engine(manifest, OnnxRuntimeBackend(folder, manifest, threads=1), Plan.of(manifest, slots), max_queue=10_000)


def decode(engine: Engine, requests: Sequence[tuple[Source, DecodingOptions]], stagger: int = 0) -> list[Answer]:
    """The answers, in order. With `stagger`, a new request joins the running batch every so many steps."""
    answers: dict[int, Answer] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.busy:
        for number, (source, options) in waiting[: 1 if stagger else None]:

            def resolve(answer: Answer, number: int = number) -> None:
                assert number not in answers, "answered twice"
                answers[number] = answer

            if isinstance(source, np.ndarray):
                engine.submit(Request((), options, resolve, features=source))
            else:
                engine.submit(Request(tuple(source), options, resolve))
        waiting = waiting[1:] if stagger else []
        for _ in range(max(1, stagger)):
            engine.step()
    return [answers[number] for number in range(len(requests))]


def results(answers: Sequence[Answer]) -> list[Result]:
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    assert not failed, failed
    return [answer for answer in answers if isinstance(answer, Result)]
