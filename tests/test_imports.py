"""Who may import whom. The rules are read from the source, so an import inside a function counts too.

protos      <- serving <- converters        torch lives on the right side only
protos      <- loadtest                     a stranger to the server: it knows the wire, no more
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("serving", "converters", "protos", "loadtest")  # imported as beamline.serving, ...
ARRAY_LIBRARIES = ("numpy", "onnxruntime", "torch")

# The subpackages and modules of serving, from the bottom: each imports only what stands before it in this list, and
# never its neighbours on a line. So there is no cycle, and engine and backends don't know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("contract",),
    ("security", "rewrites", "lifecycle"),
    ("config",),
    ("backends", "engine", "telemetry"),
    ("text",),
    ("models",),
    ("api",),
    ("server",),
    ("commands",),
    ("cli",),
)


@dataclass(frozen=True)
class Rule:
    """`ours`: the modules of this project that a package may import, with all below them."""

    ours: tuple[str, ...]
    never: tuple[str, ...] = ()


RULES = {
    # The server starts quickly, in little memory, and without what only conversion needs.
    "serving": Rule(
        ours=("beamline.serving", "beamline.protos", "beamline.version"),
        never=("torch", "transformers", "onnxscript", "onnx_ir"),
    ),
    "converters": Rule(
        ours=(
            "beamline.converters",
            "beamline.version",
            "beamline.serving.contract.manifest",  # the contract that a conversion writes
            "beamline.serving.contract.shortlist",  # the file of a lexical table
            "beamline.serving.contract.tensorrt_plans",  # the card of a plan, which a build writes
            "beamline.serving.errors",  # the one exception tree
            "beamline.serving.text.tokenizer",  # parity: the tokenizer as the server will use it
            "beamline.serving.backends.probe",  # the GPU that a plan is built for
        ),
    ),
    "loadtest": Rule(ours=("beamline.loadtest", "beamline.protos", "beamline.version")),
    "protos": Rule(ours=("beamline.protos",)),
}


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_file(module: str, root: Path) -> Path | None:
    """By the folders themselves: `beamline.serving` is a link to `serving`."""
    names = module.split(".")
    base = root.joinpath(*(names[1:] if names[0] == "beamline" and names[1:2] and names[1] in LINKED else names))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def imported(node: ast.stmt, path: Path, root: Path) -> Iterator[str]:
    """The modules that one statement names; `from a import b` gives `a.b` where that is a module of ours."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = ("beamline", *path.relative_to(root).parts)[: -node.level]
            base = ".".join([*package, *filter(None, [base])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if module_file(submodule, root) else base


def all_imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported(node, path, root))


def violations(package: str, rule: Rule, root: Path) -> list[str]:
    found = {
        f"{path.relative_to(root)}:{line} imports {name}"
        for path in (root / package).rglob("*.py")
        for line, name in all_imports(path, root)
        if within(name, rule.never)
        or within(name, LINKED)  # by its bare name: a second copy
        or (within(name, ("beamline", "examples", "tests")) and not within(name, rule.ours))
    }
    return sorted(found)


def run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that importing a module executes: not functions, not `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from run_on_import(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from run_on_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from run_on_import(handler.body)


def import_closure(module: str, root: Path) -> dict[str, str]:
    """Everything that importing `module` imports through our own files: name -> who asked for it."""
    asked: dict[str, str] = {module: "the test"}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = module_file(name, root)
        if path is None:
            continue
        parents = [name.rsplit(".", 1)[0]] if "." in name else []
        statements = run_on_import(ast.parse(path.read_text(encoding="utf-8")).body)
        for found in [*parents, *(m for node in statements for m in imported(node, path, root))]:
            if found not in asked:
                asked[found] = name
                waiting.append(found)
    return asked


@pytest.mark.parametrize("package", RULES)
def test_package_keeps_its_rule(package):
    assert violations(package, RULES[package], ROOT) == []


def layer_of(module: str) -> tuple[int, str]:
    """Where a module of serving stands, and what it belongs to there."""
    subject = module.removeprefix("beamline.serving.").split(".")[0]
    return next(level for level, names in enumerate(LAYERS) if subject in names), subject


def upward_imports(root: Path) -> list[str]:
    found = set()
    for path in (root / "serving").rglob("*.py"):
        if path == root / "serving/__init__.py":
            continue
        level, subject = layer_of(module_name(path, root / "serving"))
        for line, name in all_imports(path, root):
            if not name.startswith("beamline.serving."):
                continue
            other_level, other = layer_of(name)
            if other_level > level or (other_level == level and other != subject):
                found.add(f"{path.relative_to(root)}:{line} imports {name}")
    return sorted(found)


def test_serving_is_built_in_layers():
    assert upward_imports(ROOT) == []


def test_every_subpackage_has_its_layer():
    present = {
        path.stem for path in (ROOT / "serving").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert present - {"__init__"} == {name for names in LAYERS for name in names}


def python_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_nothing_is_imported_by_a_bare_name():
    """`import serving` works in a checkout, and would be a second copy of `beamline.serving`."""
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files()
        for line, name in all_imports(path, ROOT)
        if within(name, LINKED)
    ]
    assert found == []


def test_scheduler_knows_no_tensors():
    closure = import_closure("beamline.serving.engine.scheduler", ROOT)
    assert {name: by for name, by in closure.items() if within(name, ARRAY_LIBRARIES)} == {}


def command_modules() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands: dict[str, str] = project["entry-points"]["beamline.commands"]
    return commands


def test_commands_load_without_torch():
    """A serving environment has every command but no torch: `beamline --help` must work there. One process for all."""
    code = (
        "import importlib, json, sys; sys.modules['torch'] = None; import beamline.serving.cli\n"
        "failed = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        failed[name] = repr(error)\n"
        "print(json.dumps(failed))"
    )
    modules = sorted({target.partition(":")[0] for target in command_modules().values()})
    run = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, check=True, timeout=300)
    assert json.loads(run.stdout) == {}


class TestTheCheckItself:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Callable[[dict[str, str]], Path]:
        def write(files: dict[str, str]) -> Path:
            for name, text in files.items():
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return tmp_path

        return write

    @pytest.mark.parametrize(
        "statement",
        [
            "import torch",
            "import torch.nn as nn",
            "from torch import nn",
            "def f():\n    import torch",
            "from beamline.converters import base",
            "import beamline.converters",
            "from ..converters import base",
            "import serving.errors",
        ],
    )
    def test_sees_a_violation(self, project, statement):
        root = project({"serving/a.py": statement, "converters/tasks/generation.py": ""})
        assert len(violations("serving", RULES["serving"], root)) == 1

    @pytest.mark.parametrize(
        ("statement", "allowed"),
        [
            ("from beamline.serving.contract import manifest", True),
            ("from beamline.serving.contract.manifest import Manifest", True),
            ("from beamline.serving.engine.search.beam_search import Beam", False),
            ("from beamline.serving.models import repository", False),
            ("import beamline.serving", False),
            ("import beamline.serving.manifesto", False),
        ],
    )
    def test_follows_the_list_of_converters(self, project, statement, allowed):
        root = project(
            {"converters/a.py": statement, "serving/contract/manifest.py": "", "serving/models/repository.py": ""}
        )
        assert (violations("converters", RULES["converters"], root) == []) is allowed

    def test_closure_goes_through_packages_and_skips_what_does_not_run(self, project):
        root = project(
            {
                "serving/__init__.py": "",
                "serving/engine/__init__.py": "from . import helper",
                "serving/engine/helper.py": "try:\n    import numpy\nexcept ImportError:\n    pass",
                "serving/engine/scheduler.py": (
                    "from typing import TYPE_CHECKING\n"
                    "if TYPE_CHECKING:\n    import torch\n"
                    "def late():\n    import onnxruntime\n"
                ),
            }
        )
        closure = import_closure("beamline.serving.engine.scheduler", root)
        assert closure["numpy"] == "beamline.serving.engine.helper"
        assert "torch" not in closure
        assert "onnxruntime" not in closure
