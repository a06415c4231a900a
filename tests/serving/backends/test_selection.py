"""Which device serves, on machines that are only described; and several devices at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from beamline.serving.backends.fake import fake_manifest
from beamline.serving.backends.probe import CudaDevice, Probe
from beamline.serving.backends.selection import Machine, choose, choose_for
from beamline.serving.commands.doctor import report
from beamline.serving.contract.tensorrt_plans import usable_plans
from beamline.serving.errors import BeamlineError, ModelError

GPU = CudaDevice(0, "NVIDIA A10", "86", 24 * 2**30)
NO_DRIVER = Probe((), "there is no NVIDIA driver", "")
ONE_GPU = Probe((GPU,), "", "13.0")
V100 = CudaDevice(0, "Tesla V100", "70", 16 * 2**30)
OLD_GPU = Probe((V100,), "", "13.0")
OLD_DRIVER = Probe((GPU,), "", "12.4")
CPU_ONLY = {"onnxruntime": "1.31.1"}
CUDA = {"onnxruntime-gpu": "1.31.1", "cuda-bindings": "13.5"}
TENSORRT = {"onnxruntime": "1.31.1", "tensorrt": "11.4", "cuda-bindings": "13.5"}
RTX = {"onnxruntime": "1.31.1", "tensorrt-rtx": "1.7", "cuda-bindings": "13.5"}


@pytest.mark.parametrize(
    ("probe", "packages", "kind", "because"),
    [
        (NO_DRIVER, CPU_ONLY, "cpu", "no NVIDIA driver"),
        (NO_DRIVER, TENSORRT, "cpu", "no NVIDIA driver"),  # what is installed does not matter
        (ONE_GPU, CPU_ONLY, "cpu", "onnxruntime-gpu is not installed"),
        (ONE_GPU, CUDA, "cuda", "onnxruntime-gpu 1.31.1"),
        (ONE_GPU, TENSORRT, "tensorrt", "tensorrt 11.4"),
        (ONE_GPU, RTX, "tensorrt", "tensorrt-rtx 1.7"),
        (ONE_GPU, CUDA | RTX, "tensorrt", "tensorrt-rtx 1.7"),
    ],
)
def test_auto_takes_the_best_and_says_why(probe: Probe, packages: dict[str, str], kind: str, because: str) -> None:
    choice = choose("auto", Machine(probe, packages))
    assert (choice.kind, bool(choice.devices)) == (kind, kind != "cpu")
    assert because in choice.describe()


@pytest.mark.parametrize(
    ("asked", "probe", "packages", "because"),
    [
        ("cuda", NO_DRIVER, CUDA, "no NVIDIA driver"),
        ("tensorrt", NO_DRIVER, TENSORRT, "no NVIDIA driver"),
        ("cuda", ONE_GPU, TENSORRT, "onnxruntime-gpu is not installed"),
        ("tensorrt", ONE_GPU, CUDA, "neither tensorrt nor tensorrt-rtx"),
    ],
)
def test_what_was_asked_for_and_is_not_there_is_an_error(
    asked: str, probe: Probe, packages: dict[str, str], because: str
) -> None:
    with pytest.raises(BeamlineError, match=f"device {asked} can't be used: .*{because}"):
        choose(asked, Machine(probe, packages))


@pytest.mark.parametrize(("packages", "kind"), [(RTX | CUDA, "cuda"), (RTX, "cpu")])
def test_auto_takes_tensorrt_only_where_a_version_has_plans(
    tmp_path: Path, packages: dict[str, str], kind: str
) -> None:
    """Asked for by name it is TensorRT all the same; loading the version then says what is missing."""
    machine, manifest = Machine(ONE_GPU, packages), fake_manifest()
    choice = choose_for("auto", machine, tmp_path, manifest)
    assert choice.kind == kind
    assert "not TensorRT: " in choice.describe()
    assert "run `beamline build fake --compute-capability 86 --library tensorrt_rtx`" in choice.describe()
    assert choose_for("tensorrt", machine, tmp_path, manifest).kind == "tensorrt"
    with pytest.raises(ModelError, match="has no TensorRT plan of step, score, encoder for this GPU"):
        usable_plans(tmp_path, manifest, "tensorrt_rtx", "1.7", "86")


@pytest.mark.parametrize("lacking", ["86", "120"])
def test_auto_takes_tensorrt_only_where_every_gpu_has_plans(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that differ, whichever lacks them."""
    both = Probe((GPU, CudaDevice(1, "NVIDIA RTX 5090", "120", 32 * 2**30)), "", "13.0")

    def plans(folder: Path, manifest: object, module: str, version: str, capability: str, alone: str) -> None:
        if capability == lacking:
            raise ModelError(f"no plans for {capability}")

    monkeypatch.setattr("beamline.serving.backends.selection.usable_plans", plans)
    choice = choose_for("auto", Machine(both, RTX | CUDA), tmp_path, fake_manifest())
    assert (choice.kind, len(choice.devices)) == ("cuda", 2)
    assert f"not TensorRT: no plans for {lacking}" in choice.describe()
    lacking = "none"
    assert choose_for("auto", Machine(both, RTX | CUDA), tmp_path, fake_manifest()).kind == "tensorrt"


@pytest.mark.parametrize(
    ("probe", "because"),
    [
        (OLD_DRIVER, "the driver knows CUDA 12.4, and 13.0 is needed (driver 580 or newer)"),
        (OLD_GPU, "GPU 0 (Tesla V100) is too old: its compute capability is 70, and 75 or higher is needed"),
        (Probe((V100,), "", "12.4"), "the driver knows CUDA 12.4, and 13.0 is needed (driver 580 or newer)"),
    ],
)
def test_what_the_packages_have_no_kernels_for_is_not_used(probe: Probe, because: str) -> None:
    """It would be found, and every model would fail on it."""
    machine = Machine(probe, CUDA | RTX)
    choice = choose("auto", machine)
    assert (choice.kind, choice.reason) == ("cpu", f"there is a GPU, but {because}")
    for asked in ("cuda", "tensorrt"):
        with pytest.raises(BeamlineError, match=f"device {asked} can't be used: {re.escape(because)}"):
            choose(asked, machine)
        assert f"{asked:<12}no: {because}" in report(machine)


@pytest.mark.parametrize("probe", [Probe((replace(GPU, capability="75"),), "", "13.0"), Probe((GPU,), "", "14.1")])
def test_the_oldest_gpu_that_can_be_used_and_a_newer_driver(probe: Probe) -> None:
    assert choose("auto", Machine(probe, CUDA)).kind == "cuda"


@pytest.mark.parametrize("asked", ["auto", "cuda", "tensorrt"])
def test_of_several_gpus_those_that_are_too_old_are_left_out(asked: str) -> None:
    machine = Machine(Probe((V100, replace(GPU, number=1)), "", "13.0"), CUDA | RTX)
    choice = choose(asked, machine)
    assert [device.number for device in choice.devices] == [1]
    left_out = "GPU 0 (Tesla V100) is too old: its compute capability is 70, and 75 or higher is needed; it is left out"
    assert left_out in choice.describe()
    line = "GPU 0       Tesla V100, compute capability 70, 16.0 GiB: too old, capability 75 or higher is needed"
    assert line in report(machine)


def test_the_cpu_is_never_refused() -> None:
    assert choose("cpu", Machine(ONE_GPU, CUDA)).kind == "cpu"


def test_the_doctor_says_what_is_missing() -> None:
    text = "\n".join(report(Machine(NO_DRIVER, {**dict.fromkeys(("tensorrt", "onnxruntime-gpu")), **CPU_ONLY})))
    assert "GPU         none: there is no NVIDIA driver" in text
    assert "pip install '.[tensorrt]'" in text
    assert "cuda        no: there is no NVIDIA driver" in text
    assert "auto        cpu: no GPU" in text


def test_the_doctor_does_not_advise_two_runtimes() -> None:
    """`.[cpu]` beside `.[gpu]` would overwrite its files."""
    text = "\n".join(report(Machine(ONE_GPU, {"onnxruntime": None, **CUDA})))
    assert "onnxruntime     not installed: not needed, onnxruntime-gpu serves on the CPU, too" in text
    assert "pip install '.[cpu]'" not in text
    assert "cpu         yes" in text
    assert "pip install '.[cpu]'" in "\n".join(report(Machine(ONE_GPU, {"onnxruntime": None})))


def test_the_doctor_of_a_machine_with_a_gpu(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "manifest.json").write_text("{}")
    text = "\n".join(report(Machine(ONE_GPU, TENSORRT), tmp_path))
    assert "NVIDIA A10, compute capability 86, 24.0 GiB" in text
    assert "tensorrt    yes" in text
    assert "m/1: no plans; beamline build m/1" in text
