"""Nothing is named in a document that does not exist: pages, sections, files, options, metrics, variables, modules."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path

import pytest

from beamline.serving.cli import installed_commands
from beamline.serving.telemetry.metrics import Metrics
from tests.documents.pages import COMMANDS, all_pages, blocks, commands, text_of
from tests.support.processes import ROOT

# Options of other programs, which the documents name as well.
FOREIGN = {
    "--build-arg",  # docker
    "--read-only",
    "--rm",
    "--time",
    *("--index-url", "--config-settings", "--no-deps", "--wheel-dir"),  # pip
    "--local-dir",  # hf
    "--model-control-mode",  # Triton
    *("--output_dir", "--quantization", "--vocab_mapping", "--copy_files", "--force"),  # CTranslate2
    *("--revision", "--load_as_float16", "--low_cpu_mem_usage", "--activation_scales", "--trust_remote_code"),
}
FOREIGN_VARIABLES = {"CUDA_VISIBLE_DEVICES", "AWS_ENDPOINT_URL", "SSL_CERT_FILE"}
# Folders in which a name with a slash must be a file.
FOLDERS = (
    "beamline",
    "container",
    "converters",
    "docs",
    "examples",
    "loadtest",
    "model_repo",
    "protos",
    "serving",
    "tests",
)
# Names that a reader, or a program at run time, gives to what is not in the project.
MADE_LATER = re.compile(r"^docs/$|/N$|[<*{]|/towns(_original)?\.py$")
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|src(?:set)?=\"([^\"\s]+)\"")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_PATH = re.compile(rf"(?:\.\./)?(?:{'|'.join(FOLDERS)})/[\w./*<>-]*[\w/]")
_CAPITALS = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
_METRIC = re.compile(r"(?<![:\w])(?:beamline|nv)_[a-z_]+\b(?!:)")  # with a colon, it is one that a rule records
_MODULE = re.compile(r"python -m ([\w.]+)")
_CLASS = re.compile(r"(?<![.\w])[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+\b")  # with a dot before it, it is another library's
_HEADER = re.compile(r"\bx-[a-z]+(?:-[a-z]+)*\b")

PAGES = all_pages()


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def code_of(page: str) -> str:
    """Spans, fences and indented blocks: where names of ours stand."""
    spans = _SPAN.findall(without_blocks(page))
    return "\n".join([*spans, *(block.content for block in blocks(page))])


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
    return plain.strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(found) for found in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


@cache
def options_of(command: str) -> frozenset[str]:
    parser = argparse.ArgumentParser(prog=command)
    installed_commands()[command]().add_arguments(parser)
    return frozenset(option for action in parser._actions for option in action.option_strings)


@cache
def sources() -> str:
    """Everything in which a variable, a status or a header can be defined."""
    files = [path for folder in FOLDERS if folder not in ("docs", "tests") for path in (ROOT / folder).rglob("*")]
    files += [ROOT / name for name in ("Makefile", "Dockerfile", "docker-compose.yml", ".ci/run", ".ci/wheel")]
    kinds = {".py", ".proto", ".yml", ".js", ".json", ""}
    known = [path for path in files if path.is_file() and path.suffix in kinds and path.stat().st_size < 200_000]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in known)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in (found[0] or found[1] for found in _LINK.findall(without_blocks(page))):
        if link.startswith(("http://", "https://")):
            continue
        file, _, section = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if section:
            assert section in anchors(target), f"{page} links to {link}, which has no such section"


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    for name in sorted(set(_PATH.findall(code_of(page)))):
        if MADE_LATER.search(name):
            continue
        places = (ROOT / name, (ROOT / page).parent / name)
        assert any(place.exists() for place in places), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    known = {option for command in installed_commands() for option in options_of(command)} | FOREIGN | {"--version"}
    known |= set(_OPTION.findall((ROOT / "container/image-test").read_text())) | examples_options()
    for span in _SPAN.findall(without_blocks(page)):
        unknown = set(_OPTION.findall(span)) - known
        assert not unknown, f"{page} names {unknown}, which no command has"
    for block in blocks(page):
        for command in commands(block) if block.language in COMMANDS else ():
            for name, rest in re.findall(r"\bbeamline ([a-z]+)([^|;&\n]*)", command.text.partition(" # ")[0]):
                assert name in installed_commands(), f"{block}: there is no command 'beamline {name}'"
                unknown = set(_OPTION.findall(rest)) - options_of(name)
                assert not unknown, f"{block}: beamline {name} has no {unknown}"


@cache
def examples_options() -> frozenset[str]:
    """Of the programs in examples/ and tests/benchmarks/."""
    files = [path for folder in ("examples", "tests/benchmarks") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return frozenset(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", text))


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_modules_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in re.findall(r"(?:^|\n|`)make ([a-z-]+)", code_of(page)):
        assert name in targets, f"{page} names make {name}"
    for module in _MODULE.findall(code_of(page)):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file() or module in ("venv", "pytest"), (
            f"{page} names python -m {module}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page: str) -> None:
    declared = Metrics().declared
    known = {one.name for one in declared}
    known |= {
        f"{one.name}_{part}" for one in declared for part in ("bucket", "sum", "count") if one.kind == "histogram"
    }
    for name in _METRIC.findall(code_of(page)):
        modules = name.startswith(("beamline_pb2", "beamline_recurrent", "beamline_transformer"))
        prefix = name.endswith("_") and any(one.startswith(name) for one in known)  # `beamline_gpu_*`
        assert modules or prefix or name in known, f"{page} names the metric {name}"


@pytest.mark.parametrize("page", PAGES)
def test_variables_statuses_and_headers_exist(page: str) -> None:
    code = code_of(page)
    for name in sorted({*_CAPITALS.findall(code), *_HEADER.findall(code)}):
        foreign = name in FOREIGN_VARIABLES or name.startswith("OTEL_")
        assert foreign or name in sources(), f"{page} names {name}, which the code does not know"


@pytest.mark.parametrize("page", PAGES)
def test_classes_and_calls_exist(page: str) -> None:
    for span in _SPAN.findall(without_blocks(page)):
        for name in _CLASS.findall(span):
            assert name in sources(), f"{page} names {name}, which the code does not know"


def test_every_page_is_one_click_from_the_index() -> None:
    index = {found[0].partition("#")[0] for found in _LINK.findall(text_of("docs/README.md"))}
    missing = {path.name for path in (ROOT / "docs").glob("*.md")} - index - {"README.md"}
    assert not missing, f"docs/README.md does not lead to {missing}"
    assert "docs/README.md" in text_of("README.md").partition("\n## ")[0], "README.md does not begin with the index"


def test_the_checks_see_something() -> None:
    """So that a change of a pattern can't make all of this pass for nothing."""
    code = "\n".join(map(code_of, PAGES))
    assert len(set(_PATH.findall(code))) > 20
    assert len(set(_OPTION.findall(code))) > 60
    assert len(set(_METRIC.findall(code))) > 30
    assert {"BEAMLINE_TARGET", "INVALID_ARGUMENT"} <= set(_CAPITALS.findall(code))
    assert "x-beamline-priority" in _HEADER.findall(code)
