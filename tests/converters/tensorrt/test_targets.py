"""Which GPUs plans are built for, and by which library, on machines that are only described: those that a server there
would run."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from beamline.converters.tensorrt.command import add_arguments, what_to_build
from beamline.converters.tensorrt.library import Library
from beamline.converters.tensorrt.profiles import worst_case
from beamline.converters.tensorrt.targets import checked_capabilities
from beamline.converters.tensorrt.version import Wanted
from beamline.serving.backends.probe import CudaDevice, Probe
from beamline.serving.backends.selection import Machine, choose, choose_for
from beamline.serving.cli import main
from beamline.serving.commands.doctor import report
from beamline.serving.contract.tensorrt_plans import usable_plans
from beamline.serving.errors import ConversionError, ModelError
from tests.support.marian_shape import MarianShape
from tests.support.tensorrt_builder import ScriptedModule, scripted

VERSIONS = {"tensorrt": "11.4.0", "tensorrt-rtx": "1.7.1"}
BOTH = ("tensorrt", "tensorrt-rtx")
A10, H100 = CudaDevice(0, "NVIDIA A10", "86", 24 * 2**30), CudaDevice(0, "NVIDIA H100", "90", 80 * 2**30)
L4 = CudaDevice(1, "NVIDIA L4", "89", 24 * 2**30, "00000000-0000-0000-0000-00000000cafe")
TENSORRT, RTX = scripted(), Library("tensorrt_rtx", ScriptedModule(version=VERSIONS["tensorrt-rtx"]))


def a_machine(monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], *gpus: CudaDevice) -> Machine:
    """The one that every command finds itself on from now on."""
    for library in (TENSORRT, RTX):
        there = library.name.replace("_", "-") in packages
        monkeypatch.setitem(sys.modules, library.name, library.module if there else None)
    probe = Probe(gpus, "" if gpus else "there is no NVIDIA driver", "13.0" if gpus else "")
    machine = Machine(probe, {"onnxruntime": "1.31.1", **{name: VERSIONS[name] for name in packages}})
    monkeypatch.setattr("beamline.serving.backends.selection.look", lambda: machine)
    return machine


def what(*arguments: str) -> tuple[Library, Wanted]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return what_to_build(parser.parse_args(["m", *arguments]))


@pytest.mark.parametrize("gpu", [A10, H100], ids=lambda gpu: gpu.capability)
@pytest.mark.parametrize("packages", [BOTH, BOTH[:1], BOTH[1:]], ids="-and-".join)
def test_plans_are_built_by_the_library_that_a_server_would_use(
    packages: tuple[str, ...], gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = a_machine(monkeypatch, packages, gpu)
    if gpu is H100 and packages == ("tensorrt-rtx",):
        with pytest.raises(ConversionError, match="can't build for compute capability 90"):
            what()
        return
    for asked in ((), ("--compute-capability", gpu.capability)):
        library, wanted = what(*asked)
        assert library.name == machine.tensorrt == choose("tensorrt", machine).library
        assert wanted.capabilities == (gpu.capability,)
        assert wanted.gpu == gpu.name


def test_plans_for_other_gpus_are_built_by_the_library_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    a_machine(monkeypatch, BOTH, A10)
    library, wanted = what("--compute-capability", "80,86")
    assert (library.name, wanted.capabilities) == ("tensorrt_rtx", ("80", "86"))
    assert what("--library", "tensorrt_rtx")[0].name == "tensorrt_rtx"
    a_machine(monkeypatch, BOTH)
    library, wanted = what()
    assert (library.name, len(wanted.capabilities)) == ("tensorrt_rtx", 4)


def test_a_servers_advice_leads_to_plans_that_it_runs(
    plain_model: MarianShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both libraries: plans came from a machine that has no GPU, and where they serve, `tensorrt` runs plans."""
    manifest = plain_model.manifest
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / manifest.name / "1"))
    build = ["build", manifest.name, "--compute-capability", "86"]
    common = ["--repo", str(tmp_path), "--buckets", str(worst_case(manifest))]
    a_machine(monkeypatch, BOTH)
    assert main([*build, *common]) == 0
    machine = a_machine(monkeypatch, BOTH, A10)
    reason = choose_for("auto", machine, folder, manifest).reason
    foreign, advice = "it was built by tensorrt_rtx, and this machine runs tensorrt", f"beamline {shlex.join(build)}"
    assert foreign in reason
    assert f"run `{advice} --library tensorrt`" in reason
    name = f"{manifest.name}/1"
    advice = advice.replace(manifest.name, name)
    told = f"{name}: tensorrt_rtx for 86; not for GPU 0: {foreign}: {advice} --library tensorrt"
    assert report(machine, tmp_path)[-1] == told
    assert main([*build, "--library", "tensorrt", *common]) == 0
    assert choose_for("auto", machine, folder, manifest).kind == "tensorrt"
    assert report(machine, tmp_path)[-1] == f"{name}: tensorrt for 86, tensorrt_rtx for 86"
    capsys.readouterr()


def test_plans_are_built_for_each_gpu_that_is_there(
    plain_model: MarianShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By tensorrt-rtx: `auto` wants plans for all of them."""
    manifest = plain_model.manifest
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / manifest.name / "1"))
    machine = a_machine(monkeypatch, BOTH[1:], replace(L4, number=0), replace(A10, number=1), replace(L4, number=2))
    assert what()[1].capabilities == ("86", "89")
    assert main(["build", manifest.name, "--repo", str(tmp_path), "--buckets", str(worst_case(manifest))]) == 0
    choice = choose_for("auto", machine, folder, manifest)
    assert (choice.kind, len(choice.devices)) == ("tensorrt", 3)
    capsys.readouterr()


def test_tensorrt_builds_for_one_gpu_after_the_other(
    plain_model: MarianShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It builds for the first that it sees, and each advice for another one makes that the first."""
    manifest = plain_model.manifest
    folder = Path(shutil.copytree(plain_model.folder, tmp_path / manifest.name / "1"))
    build = ["build", manifest.name, "--repo", str(tmp_path), "--buckets", str(worst_case(manifest))]
    machine = a_machine(monkeypatch, BOTH, A10, L4)
    assert main(build) == 0
    only_l4 = f"CUDA_VISIBLE_DEVICES=GPU-{L4.uuid} beamline build"
    wanted = "--compute-capability 89"
    name = manifest.name
    assert f"run `{only_l4} {name} {wanted} --library tensorrt`" in choose_for("auto", machine, folder, manifest).reason
    assert report(machine, tmp_path)[-1].endswith(f": {only_l4} {name}/1 {wanted} --library tensorrt")
    with pytest.raises(ModelError, match=only_l4):
        usable_plans(folder, manifest, "tensorrt", VERSIONS["tensorrt"], "89", L4.alone)
    assert main([*build, "--compute-capability", "89"]) == 2
    told = f"tensorrt builds only for the GPU that is there (86): for 89, {only_l4} ... {wanted}"
    assert told in capsys.readouterr().err
    a_machine(monkeypatch, BOTH, replace(L4, number=0))
    assert main([*build, "--compute-capability", "89", "--library", "tensorrt"]) == 0
    machine = a_machine(monkeypatch, BOTH, A10, L4)
    assert choose_for("auto", machine, folder, manifest).kind == "tensorrt"
    assert report(machine, tmp_path)[-1] == f"{name}/1: tensorrt for 86, tensorrt for 89"
    capsys.readouterr()


def test_capabilities_are_checked() -> None:
    assert checked_capabilities("8.0, 86", RTX, ()) == ("80", "86")
    assert checked_capabilities(None, RTX, [A10]) == ("86",)
    assert len(checked_capabilities(None, RTX, ())) == 4
    with pytest.raises(ConversionError, match="numbers such as"):
        checked_capabilities("ampere", RTX, ())
    with pytest.raises(ConversionError, match="on the GPU itself"):
        checked_capabilities(None, TENSORRT, ())
    assert checked_capabilities("8.6", TENSORRT, [A10]) == ("86",)
    only = r"only for the GPU that is there \(86\): "
    with pytest.raises(ConversionError, match=only + "for GPUs that are not here, --library tensorrt_rtx"):
        checked_capabilities("80", TENSORRT, [A10])
    both_ways = "for 89, CUDA_VISIBLE_DEVICES=.* beamline build .*; for GPUs that are not here, --library tensorrt_rtx"
    with pytest.raises(ConversionError, match=only + both_ways):
        checked_capabilities("80,86,89", TENSORRT, [A10, L4])


def test_a_gpu_that_nobody_would_serve_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server leaves it out: it is too old."""
    old = CudaDevice(0, "NVIDIA GTX 1080", "61", 8 * 2**30)
    a_machine(monkeypatch, BOTH[1:], old, L4)
    assert what()[1].capabilities == ("89",)
    a_machine(monkeypatch, BOTH[:1], old, L4)
    with pytest.raises(ConversionError, match=f"CUDA_VISIBLE_DEVICES=GPU-{L4.uuid}"):
        what()
