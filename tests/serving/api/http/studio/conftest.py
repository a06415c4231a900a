"""One server and one browser for all of the studio's tests of a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.serving.config import ServeConfig
from tests.converters.families.test_captions import write_converted
from tests.loadtest.browser import Browser, browsing
from tests.serving.api.http.studio.driver import Studio, in_thread
from tests.support.captions import EXAMPLE
from tests.support.fixture_cache import fixture_cache
from tests.support.processes import ROOT
from tests.support.seq2seq import NLLB, convert_seq2seq


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, pooled_repository: Path) -> Path:
    root = tmp_path_factory.mktemp("repository")
    captions = fixture_cache().fill(root / "made", write_converted, files=[EXAMPLE], kind="paper") / "repository"
    many = convert_seq2seq(NLLB, root / "many").folder.parents[1]
    made = (pooled_repository, captions, many)
    for source in (*(ROOT / "model_repo").iterdir(), *(each for folder in made for each in folder.iterdir())):
        if source.is_dir():
            shutil.copytree(source, root / "served" / source.name)
    return root / "served"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[str]:
    """The shipped models, a classifier, one that captions, one that knows many languages, and a language model that
    echoes and chats."""
    with in_thread(
        ServeConfig(
            repository=repository,
            fake=True,
            grpc_port=0,
            metrics_port=0,
            http_port=0,
            threads=1,
            engines=1,
            max_slots=4,
        )
    ) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as running:
        running.resize(1360, 1000)
        yield running


@pytest.fixture
def studio(browser: Browser, server: str) -> Iterator[Studio]:
    """Fresh, at the beginning; afterwards nothing may have been logged, and no other host asked."""
    browser.open("about:blank")
    browser.open(f"http://{server}/")
    found = Studio(browser, server)
    found.wait("document.querySelector('#model')")
    yield found
    assert browser.console() == []
    asked = [url for url in browser.requested() if not url.startswith(("data:", "blob:", "about:"))]
    assert [url for url in asked if not url.startswith(f"http://{server}/")] == []
