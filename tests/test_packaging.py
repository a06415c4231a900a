"""What pyproject.toml promises is there, and what is there is shipped."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed():
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in {name.split(".")[0] for name in listed}
        for path in (ROOT / top).rglob("*.py")
    }
    assert set(listed) == present


def test_every_package_has_an_init():
    missing = [
        name
        for name in PYPROJECT["tool"]["setuptools"]["packages"]
        if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()
    ]
    assert missing == []


def test_every_command_exists():
    missing = [
        target
        for target in PYPROJECT["project"]["entry-points"]["beamline.commands"].values()
        if not (ROOT / f"{target.partition(':')[0].replace('.', '/')}.py").is_file()
    ]
    assert missing == []


def test_pins_can_be_installed_anywhere():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert [pin for pin in pins if pin.count("==") != 1 or "+" in pin or "/" in pin] == []
