"""What pyproject.toml promises is there, and what is there is shipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from beamline.version import DISTRIBUTION

ROOT = Path(__file__).parents[1]
LINKED = ("serving", "converters", "protos", "loadtest")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_of_code_is_a_package():
    """Those without __init__.py would be left out of a wheel."""
    missing = {
        str(path.parent.relative_to(ROOT))
        for top in LINKED
        for path in (ROOT / top).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    }
    assert missing == set()


def test_the_package_links_to_the_directories_of_the_top_level():
    links = {path.name: os.readlink(path) for path in (ROOT / "beamline").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in LINKED}


def test_no_requirement_names_the_stranger():
    """`beamline` in the package registry is somebody else's distribution."""
    project = PYPROJECT["project"]
    assert project["name"] == DISTRIBUTION
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {re.split(r"[\[<>=!~; ]", line)[0] for line in [*project["dependencies"], *extras]}
    assert "beamline" not in names


def test_it_is_imported_beside_a_clone(tmp_path: Path) -> None:
    """A folder that is called as the package is, and is none, does not come before it."""
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        pytest.skip("these sources are not installed")
    (tmp_path / "beamline").mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import beamline; print(beamline.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("__init__.py"), "an environment of before: run make .venv/.ready"


def test_every_editable_install_is_by_path() -> None:
    made = [line for line in (ROOT / "Makefile").read_text().splitlines() if re.search(r"\$\(PIP\).*'\.\[", line)]
    assert len(made) >= 4
    assert all("$(EDITABLE)" in line for line in made)


def test_tensorrt_is_there_before_an_install_without_build_isolation() -> None:
    """Its libraries are built by a backend of their own, which only an isolated build installs."""
    recipes = [recipe.splitlines() for recipe in (ROOT / "Makefile").read_text(encoding="utf-8").split("\n\n")]
    editable = "$(EDITABLE) '.["
    wanting = [lines for lines in recipes if re.search(r"'\.\[(.*,)?tensorrt[],]", "".join(lines))]
    assert wanting
    for lines in wanting:
        before = lines[: next(number for number, line in enumerate(lines) if editable in line)]
        assert "\t@$(@D)/bin/python $(PIP) tensorrt" in before


def test_no_hint_names_the_stranger():
    """What a message or a page tells to install has to be ours: from the folder, a wheel or an image."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [
        name
        for name in listed.splitlines()
        if name.endswith((".py", ".md", ".toml", ".yml"))
        and re.search(r"pip install [^\n`]*['\" ]beamline(\[|['\"\s]|$)", (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []


def test_mypy_checks_every_file():
    """It follows the links: with fewer files than git lists, something is no longer checked."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours = {name for name in listed.splitlines() if "_pb2" not in name and not name.startswith("container/")}
    found = find_sources([str(ROOT / name) for name in PYPROJECT["tool"]["mypy"]["files"]])
    assert ours - found == set()


def find_sources(paths: list[str]) -> set[str]:
    """As mypy finds them by pyproject.toml, relative to the project, links followed."""
    from mypy.find_sources import create_source_list
    from mypy.options import Options

    options = Options()
    options.exclude = PYPROJECT["tool"]["mypy"]["exclude"]
    options.explicit_package_bases = True
    found = create_source_list(paths, options)
    return {str(Path(source.path).resolve().relative_to(ROOT)) for source in found if source.path is not None}


def test_every_command_exists():
    missing = [
        target
        for target in PYPROJECT["project"]["entry-points"]["beamline.commands"].values()
        if not (ROOT / f"{target.partition(':')[0].replace('.', '/')}.py").is_file()
    ]
    assert missing == []


def read_pins(folder: Path) -> list[str]:
    return [line for line in (folder / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]


def test_pins_can_be_installed_anywhere():
    assert [pin for pin in read_pins(ROOT) if pin.count("==") != 1 or "+" in pin or "/" in pin] == []


def test_the_runtimes_for_gpus_are_pinned() -> None:
    """Placement and workarounds are written for one release of them; and an image built again is the same."""
    pins = dict(pin.split("==") for pin in read_pins(ROOT))
    extras = PYPROJECT["project"]["optional-dependencies"]
    needed = {re.split(r"[\[<>=]", line)[0] for line in [*extras["gpu"], *extras["tensorrt"]]}
    libraries = ("cublas", "cuda-nvrtc", "cuda-runtime", "cudnn-cu13", "cufft", "curand", "nvjitlink")
    assert needed | {f"nvidia-{name}" for name in libraries} <= pins.keys()
    assert pins["onnxruntime-gpu"] == pins["onnxruntime"]


# Python and pip, as far as `make pins` calls them.
PYTHON_DOUBLE = """\
#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p "$3/bin"
cp "$(dirname "$0")/pip" "$3/bin/pip"
"""
PIP_DOUBLE = """\
#!/bin/sh
echo "$@" >>asked
case "$*" in
    *freeze*) printf 'onnxruntime==1.5\\nsome_thing==2.0\\ntorch==2.13.0+cpu\\n' ;;
    *"dry-run"*".[gpu]"*) echo "Would install nvidia-cublas-13.1 onnxruntime-gpu-1.5 some-thing-2.0 torch-2.13.0" ;;
    *"dry-run"*) echo "Would install tensorrt-11.4" ;;
esac
"""


def test_make_pins_writes_each_package_once_with_those_for_gpus(tmp_path: Path) -> None:
    for name, text in (("python", PYTHON_DOUBLE), ("pip", PIP_DOUBLE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "constraints.txt").write_text("# What it is.\ntorch==2.13.0\nonnxruntime==1.4\n")
    command = ["make", "-f", str(ROOT / "Makefile"), "pins", f"PYTHON={tmp_path / 'python'}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "constraints.txt").read_text().splitlines() == [
        "# What it is.",
        "nvidia-cublas==13.1",
        "onnxruntime==1.5",
        "onnxruntime-gpu==1.5",
        "some_thing==2.0",
        "tensorrt==11.4",
        "torch==2.13.0",
    ]
    assert "torch===2.13.0" in (tmp_path / "asked").read_text()  # the build for CUDA, whose libraries are meant


def test_the_gpu_extra_brings_the_libraries_of_cuda():
    """Without them the CUDA provider does not load, and without cuDNN no recurrent model does; and nobody asks for them
    a second time, elsewhere."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert "onnxruntime-gpu[cuda,cudnn]>=1.31" in extras["gpu"]
    for file in ("Makefile", "Dockerfile"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "gpu" in text
        assert re.search(r"install.*onnxruntime-gpu", text) is None
