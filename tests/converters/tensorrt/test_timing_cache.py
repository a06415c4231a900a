"""What TensorRT measured is kept for the next build, and never stands in the way of one."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from beamline.converters.tensorrt.build import CURRENT, BuildFailure, build
from beamline.converters.tensorrt.graph import Graph
from beamline.converters.tensorrt.profiles import worst_case
from beamline.converters.tensorrt.version import Wanted, build_version
from beamline.serving.contract.tensorrt_plans import ENGINES
from tests.support.marian_shape import MarianShape
from tests.support.tensorrt_builder import PLAN, REFUSAL, SIZES, scripted

OLD = b"measured by 10.9.0"


def test_what_one_build_measured_the_next_one_knows(relu: Graph, tmp_path: Path) -> None:
    library, timings = scripted(), tmp_path / "timings"
    for _ in range(2):
        assert build(relu, SIZES, library, CURRENT, timings).content == PLAN
    assert library.module.timings == [b"", b"measured by 11.4.0"]
    assert timings.read_bytes() == b"measured by 11.4.0"


@pytest.mark.parametrize("refuses", ["empty", "none", "mismatch"])
def test_a_cache_that_is_refused_is_measured_anew(
    relu: Graph, refuses: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another release or GPU, in each way in which TensorRT may refuse it. That it says so fails nothing."""
    library, timings = scripted(refuses=refuses), tmp_path / "timings"
    timings.write_bytes(OLD)
    with caplog.at_level(logging.WARNING, "beamline.converters"):
        assert build(relu, SIZES, library, CURRENT, timings).content == PLAN
    assert library.module.timings == [b""]
    assert timings.read_bytes() == b"measured by 11.4.0"
    (record,) = caplog.records
    assert f"{timings} can't be used, and is measured anew: " in record.getMessage()
    assert REFUSAL[1][1] in record.getMessage()


def test_a_refused_cache_is_gone_where_the_build_fails_too(relu: Graph, tmp_path: Path) -> None:
    timings = tmp_path / "timings"
    timings.write_bytes(OLD)
    with pytest.raises(BuildFailure) as failure:
        build(relu, SIZES, scripted(refuses="empty", plan=None), CURRENT, timings)
    assert failure.value.reasons == ["TensorRT gave no reason"]
    assert not timings.exists()


def test_a_plan_is_built_where_there_can_be_no_cache(relu: Graph, tmp_path: Path) -> None:
    library, timings = scripted(refuses="every"), tmp_path / "timings"
    assert build(relu, SIZES, library, CURRENT, timings).content == PLAN
    assert library.module.timings == [None]
    assert not timings.exists()


def test_each_gpu_and_release_has_a_cache_of_its_own(plain_model: MarianShape, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / "version"))
    bucket = worst_case(plain_model.manifest)

    def built(gpu: str, version: str) -> list[bytes | None]:
        library = scripted(version=version, refuses="empty")
        wanted = Wanted(("86",), (bucket,), slots=8, rebuild=True, gpu=gpu)
        build_version(folder, plain_model.manifest, library, wanted, lambda outcome: None)
        begun: list[bytes | None] = library.module.timings
        return begun

    def kept() -> list[str]:
        return sorted(path.name for path in (folder / ENGINES).glob("timings-*"))

    first, *later = built("NVIDIA GeForce RTX 3090", "11.4.0")
    assert first == b""
    assert set(later) == {b"measured by 11.4.0"}
    assert kept() == ["timings-sm86-nvidia-geforce-rtx-3090-11.4.0.tensorrt"]
    assert built("NVIDIA A10", "11.4.0")[0] == b""
    assert len(kept()) == 2
    (folder / ENGINES / "timings-sm86.tensorrt").write_bytes(OLD)  # of a release of ours that named it so
    assert built("NVIDIA A10", "11.5.0")[0] == b""
    assert kept() == ["timings-sm86-nvidia-a10-11.5.0.tensorrt"]
