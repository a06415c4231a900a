"""Who may import whom. The rules are read from the source, so an import inside a function counts too.

protos      <- serving <- converters        torch lives on the right side only
protos      <- loadtest                     a stranger to the server: it knows the wire, and how a client connects
protos, serving.errors <- beamline.client   the clients: the wire and the one exception tree
serving     <- beamline.in_process          a model without a server: no gRPC
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.import_graph import LINKED, all_imports, import_closure, module_name

ROOT = Path(__file__).parents[1]
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
    ("service", "in_process"),
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
            "beamline.serving.backends.selection",  # the library that a server here would run it with
        ),
    ),
    "loadtest": Rule(
        ours=("beamline.loadtest", "beamline.protos", "beamline.version", "beamline._channel", "beamline.errors")
    ),
    "protos": Rule(ours=("beamline.protos",)),
}

GRPC_ONLY = (
    "beamline.client",
    "beamline.async_client",
    "beamline._channel",
    "beamline._connected",
    "beamline._failures",
)

# The modules of `beamline` itself: the clients. What is linked beside them has rules of its own.
CLIENT_RULE = Rule(
    ours=(
        *("beamline.client", "beamline.async_client", "beamline.types", "beamline.errors", "beamline.version"),
        *("beamline._channel", "beamline._connected", "beamline._failures", "beamline._lists"),
        *("beamline._methods", "beamline._async_methods", "beamline._calls"),
        "beamline.protos",
        "beamline.serving.errors",  # the one exception tree
    ),
    never=(*ARRAY_LIBRARIES, "pydantic"),
)


# The commands that ask a model do it as any user would; how a server is administered is no user's concern.
COMMANDS_RULE = Rule(
    ours=(
        *RULES["serving"].ours,
        *("beamline.client", "beamline.in_process", "beamline.types", "beamline.errors"),
        *("beamline._channel", "beamline._failures"),
    ),
    never=RULES["serving"].never,
)

# A model in process: what a client has, and the server's parts; but nothing of what is sent.
IN_PROCESS = "beamline/in_process.py"
IN_PROCESS_RULE = Rule(
    ours=(*(name for name in CLIENT_RULE.ours if name not in GRPC_ONLY), "beamline.serving"),
    never=("grpc", "torch"),
)


# A Ray application puts the whole server before Ray, which only what runs inside Ray may import; clients never do.
RAY_RULE = Rule(ours=("beamline.ray", "beamline.serving", "beamline.protos"), never=RULES["serving"].never)


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def violations(package: str, rule: Rule, root: Path) -> list[str]:
    return violations_in((root / package).rglob("*.py"), rule, root)


def violations_in(files: Iterable[Path], rule: Rule, root: Path) -> list[str]:
    found = {
        f"{path.relative_to(root)}:{line} imports {name}"
        for path in files
        for line, name in all_imports(path, root)
        if within(name, rule.never)
        or within(name, LINKED)  # by its bare name: a second copy
        or (within(name, ("beamline", "examples", "tests")) and not within(name, rule.ours))
    }
    return sorted(found)


@pytest.mark.parametrize("package", RULES)
def test_package_keeps_its_rule(package):
    found = violations(package, RULES[package], ROOT)
    assert [each for each in found if not each.startswith("serving/commands/")] == []


def test_commands_of_the_server_may_use_the_public_api():
    assert violations("serving/commands", COMMANDS_RULE, ROOT) == []


def test_the_clients_keep_theirs():
    files = [*(ROOT / "beamline").glob("*.py"), *(ROOT / "beamline/_calls").glob("*.py")]
    others = (ROOT / IN_PROCESS, ROOT / "beamline/__main__.py")  # a model in process, and the command
    found = violations_in([path for path in files if path not in others], CLIENT_RULE, ROOT)
    # What the package names for type checkers it imports when it is asked for.
    assert [
        each for each in found if not re.match(r"beamline/__init__\.py:\d+ imports beamline\.in_process", each)
    ] == []


def test_so_does_a_model_in_process():
    assert violations_in([ROOT / IN_PROCESS], IN_PROCESS_RULE, ROOT) == []


def test_so_does_the_ray_application():
    assert violations_in((ROOT / "beamline/ray").glob("*.py"), RAY_RULE, ROOT) == []


def test_what_runs_in_rays_proxy_can_be_read_without_ray():
    assert {name for name in import_closure("beamline.ray", ROOT) if within(name, ("ray", "torch"))} == set()


def test_a_model_in_process_loads_no_grpc():
    closure = import_closure("beamline.in_process", ROOT)
    assert {name: by for name, by in closure.items() if within(name, ("grpc", "starlette", "uvicorn", "torch"))} == {}


def test_importing_beamline_imports_nothing_else_of_ours():
    """The clients, and gRPC with them, are imported when they are first used."""
    assert {name for name in import_closure("beamline", ROOT) if within(name, ("beamline", "grpc", "google"))} == {
        "beamline"
    }


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
    return {name: target.partition(":")[0] for name, target in commands.items()}


# What stands behind its mark is what the test reads: a module may print while it is imported.
_MARK = "outcomes: "
_IMPORT_ALL = """
import importlib, json, sys, traceback

def attempt(module):
    try:
        importlib.import_module(module)
    except BaseException:
        return traceback.format_exc()

modules = json.loads(sys.argv[1])
outcomes = {"cli": attempt("beamline.serving.cli") or ("it imported torch" if "torch" in sys.modules else None)}
sys.modules["torch"] = None  # from here on, `import torch` fails
outcomes.update((name, attempt(module)) for name, module in modules.items())
print(sys.argv[2] + json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def import_outcomes() -> dict[str, str | None]:
    """What importing the command line, and behind it each command where torch is missing, came to: None or a
    traceback. One process for all, because most of its time goes into what they share."""
    arguments = [json.dumps(command_modules()), _MARK]
    process = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, *arguments],
        cwd=ROOT,
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    outcomes: dict[str, str | None] = json.loads(process.stdout.rpartition(_MARK)[2])
    return outcomes


def test_cli_does_not_load_torch(import_outcomes):
    assert import_outcomes["cli"] is None, import_outcomes["cli"]


@pytest.mark.parametrize("command", command_modules())
def test_command_loads_without_torch(import_outcomes, command):
    """A serving environment has every command but no torch: `beamline --help` must work there."""
    assert import_outcomes[command] is None, import_outcomes[command]


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

    @pytest.mark.parametrize(
        ("statement", "allowed"),
        [
            ("from beamline.serving.errors import BeamlineError", True),
            ("from beamline.protos import beamline_pb2", True),
            ("from beamline.serving.contract.call import REQUEST_ID", False),
            ("def f():\n    import numpy", False),
        ],
    )
    def test_follows_the_list_of_the_clients(self, project, statement, allowed):
        root = project({"beamline/client.py": statement, "serving/contract/call.py": "", "serving/errors.py": ""})
        assert (violations_in([root / "beamline/client.py"], CLIENT_RULE, root) == []) is allowed

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
