"""Every command and every Python block of README.md and docs/ is run, page by page, or says why not."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.pages import COMMANDS, Block, Command, blocks, commands, pages
from tests.documents.reader import THE_PAGES_OWN, Reader, check_build
from tests.documents.reader_files import Belongings
from tests.documents.servers import LOADED, Servers
from tests.support.language_models import ConvertedLanguageModel

pytestmark = pytest.mark.starts_early

# Why whole kinds of commands are not run. A single block says it in a comment above it.
NOT_RUN = {
    r"^make ": "sets up environments, or runs the tests; that the target exists is checked",
    r"^python3 -m venv |pip install ": "installs packages: .ci/wheel does so, into an empty environment",
    r"^docker ": "needs a container engine; container/image-test builds and runs the same image with buildah",
    r"--device (cuda|tensorrt)": "needs a GPU",
}
if shutil.which("openssl") is None:
    NOT_RUN[r"^openssl "] = "there is no openssl here"
# What takes longer than a moment.
FULL = (
    r"^beamline loadtest (?!.*--out (before|result))",
    r"^beamline (convert|build|shortlist) ",
    r"^python -m (examples\.|pytest )",
)
# Fences whose content can at least be read.
READERS = {"json": json.loads, "toml": tomllib.loads}
SHOWN = ("text", "python", "proto", "yaml", "dockerfile", *READERS, *COMMANDS)


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, language_model: ConvertedLanguageModel, pooled_repository: Path
) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"), language_model.folder, pooled_repository)
    yield made
    made.close()


@pytest.fixture(scope="module")
def belongings(marian_directory: Path, model_repository: Path) -> Belongings:
    return Belongings(marian_directory, model_repository / "tiny" / "1")


def why_not(command: Command) -> str | None:
    """Why a command is not run; None where it is."""
    if reason := command.block.marks.get("not run"):
        return reason
    if command.is_synopsis:
        return "a synopsis; its options are checked"
    said = command.text.partition("  #")[0]  # not what a comment says
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, said)), None)


def is_long(command: Command) -> bool:
    return "full" in command.block.marks or any(re.search(pattern, command.text) for pattern in FULL)


def follow(page: str, folder: Path, servers: Servers, belongings: Belongings, *, full: bool) -> None:
    with Reader(folder, servers) as reader:
        belongings.put_into(reader.folder, converted=not full)
        for block in blocks(page):
            if block.language == "python":
                if "not run" not in block.marks and (full or "full" not in block.marks):
                    reader.read(block, [])
            elif block.language in COMMANDS:
                wanted = [each for each in commands(block) if why_not(each) is None and (full or not is_long(each))]
                if wanted:
                    reader.read(block, wanted)
                for each in commands(block):
                    if each.text.startswith("docker build ") and "not run" not in block.marks:
                        check_build(each.text, reader.folder)


@pytest.mark.parametrize("page", pages())
def test_a_page_can_be_followed(page: str, tmp_path: Path, servers: Servers, belongings: Belongings) -> None:
    follow(page, tmp_path, servers, belongings, full=False)


@pytest.mark.full
@pytest.mark.parametrize("page", pages())
def test_so_can_what_takes_long(page: str, tmp_path: Path, servers: Servers, belongings: Belongings) -> None:
    follow(page, tmp_path, servers, belongings, full=True)


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks(page):
        assert block.language in SHOWN, f"{block}: a fence needs its language, one of {', '.join(SHOWN)}"
        assert block.server in (*LOADED, THE_PAGES_OWN), f"{block}: there is no server {block.server!r}"
        if block.language in READERS:
            READERS[block.language](block.content)
        if block.language == "python":
            compile(block.content, str(block), "exec")


def test_the_pages_have_what_is_run() -> None:
    """So that a change of the parser can't make all of this pass for nothing."""
    everything = [block for page in pages() for block in blocks(page)]
    lines = [each for block in everything if block.language in COMMANDS for each in commands(block)]
    run = [each for each in lines if why_not(each) is None]
    assert len(run) > 40
    assert sum(not is_long(each) for each in run) > 30
    python = [block for block in everything if block.language == "python" and "not run" not in block.marks]
    assert len(python) > 10
    assert {block.server for block in python} >= set(LOADED)
    assert _long_blocks(everything) <= 8


def _long_blocks(found: list[Block]) -> int:
    return sum("full" in block.marks for block in found)
