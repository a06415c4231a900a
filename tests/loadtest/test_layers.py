"""Each package of the load tester imports only those before it."""

from __future__ import annotations

import pytest

from tests.test_imports import ROOT, all_imports, within

COMMON = ("beamline.loadtest.errors", "beamline.loadtest.quantities")
LAYERS = (
    "beamline.loadtest.targets",
    "beamline.loadtest.load",
    "beamline.loadtest.report",
    "beamline.loadtest.judgement",
)


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    allowed = (*COMMON, *LAYERS[: LAYERS.index(package) + 1])
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in (ROOT / package.replace(".", "/")).rglob("*.py")
        for line, name in all_imports(path, ROOT)
        if within(name, ("loadtest",)) and not within(name, allowed)
    ]
    assert found == []
