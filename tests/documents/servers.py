"""The servers that the documents ask, each started when it is first needed, and one for all pages.

| mark | what it serves |
|---|---|
| all, by default | the shipped models (`en-de` where none is named), a language model `lm`, classifier `mood` |
| a language model | `lm` alone |
| a classifier | `mood` alone |
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from tests.documents.reader import Addresses
from tests.documents.reader_files import rename
from tests.support.processes import ROOT, serving

LOADED = {"all": (), "a language model": ("lm",), "a classifier": ("mood",)}


class Servers:
    def __init__(self, folder: Path, language_model: Path, pooled: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._started: dict[str, Addresses] = {}
        repository = folder / "repository"
        shutil.copytree(ROOT / "model_repo", repository)
        shutil.copytree(pooled / "mood", repository / "mood")
        rename(shutil.copytree(language_model, repository / "lm" / "1"), "lm")

    def __call__(self, kind: str) -> Addresses:
        if kind not in self._started:
            loads = [word for model in LOADED[kind] for word in ("--load", model)]
            log = self._folder / f"{kind}.log"
            repository = str(self._folder / "repository")
            server = self._stack.enter_context(serving(log, "--repo", repository, "--threads", "1", *loads))
            self._started[kind] = Addresses(server.grpc, server.http, server.metrics_address)
        return self._started[kind]

    def close(self) -> None:
        self._stack.close()
