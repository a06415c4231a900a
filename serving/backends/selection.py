"""Which device serves: what was asked for, or the best that is really there. Never another one in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from beamline.serving.backends.probe import CudaDevice, Probe, installed, probe
from beamline.serving.contract.manifest import AnyManifest, PooledManifest
from beamline.serving.contract.tensorrt_plans import usable_plans
from beamline.serving.errors import BeamlineError, ModelError

Kind = Literal["cpu", "cuda", "tensorrt"]
DEVICE_OPTIONS = ("auto", "cpu", "cuda", "tensorrt")
TENSORRT = ("tensorrt", "tensorrt-rtx")  # packages; the first that is installed runs the plans
_PACKAGES = ("onnxruntime", "onnxruntime-gpu", *TENSORRT, "cuda-bindings")
# The packages for GPUs are builds for this CUDA, and it has dropped GPUs before Turing. What is older is found by the
# driver, and then fails with every model.
NEEDED_CUDA, NEEDED_DRIVER, NEEDED_CAPABILITY = (13, 0), 580, 75


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: GPUs that answer, and packages with their versions."""

    probe: Probe
    packages: Mapping[str, str | None]

    def has(self, package: str) -> bool:
        return self.packages.get(package) is not None

    @property
    def tensorrt(self) -> str | None:
        """The name to import."""
        return next((name.replace("-", "_") for name in TENSORRT if self.has(name)), None)

    @property
    def tensorrt_version(self) -> str:
        return str(self.packages.get(str(self.tensorrt).replace("_", "-")))

    @property
    def usable(self) -> tuple[CudaDevice, ...]:
        """The GPUs that the packages have kernels for."""
        return tuple(device for device in self.probe.devices if int(device.capability) >= NEEDED_CAPABILITY)


@dataclass(frozen=True, slots=True)
class Choice:
    kind: Kind
    devices: tuple[CudaDevice, ...]  # empty for the CPU
    reason: str
    library: str | None = None  # tensorrt or tensorrt_rtx

    def describe(self) -> str:
        names = ", ".join(f"GPU {device.number} ({device.name}, {device.capability})" for device in self.devices)
        return f"device: {self.kind}{f' on {names}' if names else ''}: {self.reason}"


ON_CPU = Choice("cpu", (), "the default")


def look() -> Machine:
    """Imports nothing that could crash: packages are only looked up."""
    return Machine(probe(), {package: installed(package) for package in _PACKAGES})


def choose(asked: str, machine: Machine) -> Choice:
    """Raises a `BeamlineError` where what was asked for is not there."""
    if asked == "cpu":
        return Choice("cpu", (), "asked for")
    lacking = {kind: _lacking(kind, machine) for kind in ("tensorrt", "cuda")}
    if asked in lacking:
        if lacking[asked]:
            raise BeamlineError(f"device {asked} can't be used: {lacking[asked]} (`beamline doctor` says more)")
        return _gpu(asked, machine, "asked for")
    for kind, reason in lacking.items():
        if not reason:
            return _gpu(kind, machine, f"the best that is here: {_why(kind, machine)}")
    if machine.probe.devices:
        reasons = dict.fromkeys(lacking.values())  # one, where it is the driver's or the GPU's
        return Choice("cpu", (), f"there is a GPU, but {', and '.join(reasons)}")
    return Choice("cpu", (), f"no GPU is here, and none is needed ({machine.probe.reason})")


def _gpu(kind: str, machine: Machine, reason: str) -> Choice:
    reason = "; ".join((reason, *(f"{why}; it is left out" for why in _too_old(machine))))
    if kind == "tensorrt":
        return Choice("tensorrt", machine.usable, reason, machine.tensorrt)
    return Choice("cuda", machine.usable, reason)


def _too_old(machine: Machine) -> list[str]:
    """A sentence for each GPU that can't be used."""
    return [
        f"GPU {device.number} ({device.name}) is too old: its compute capability is {device.capability}, and "
        f"{NEEDED_CAPABILITY} or higher is needed"
        for device in machine.probe.devices
        if device not in machine.usable
    ]


def _lacking(kind: str, machine: Machine) -> str:
    if not machine.probe.devices:
        return machine.probe.reason
    if tuple(map(int, machine.probe.driver.split("."))) < NEEDED_CUDA:
        needed = ".".join(map(str, NEEDED_CUDA))
        return f"the driver knows CUDA {machine.probe.driver}, and {needed} is needed (driver {NEEDED_DRIVER} or newer)"
    if not machine.usable:
        return "; ".join(_too_old(machine))
    if kind == "tensorrt":
        return "" if machine.tensorrt else "neither tensorrt nor tensorrt-rtx is installed"
    return "" if machine.has("onnxruntime-gpu") else "onnxruntime-gpu is not installed"


def _why(kind: str, machine: Machine) -> str:
    if kind == "cuda":
        return f"onnxruntime-gpu {machine.packages['onnxruntime-gpu']}"
    name = str(machine.tensorrt).replace("_", "-")
    return f"{name} {machine.packages[name]}"


def choose_for(asked: str, machine: Machine, folder: Path, manifest: AnyManifest) -> Choice:
    """The same for one version: `auto` takes TensorRT only where the version has plans for every GPU that it would run
    on."""
    choice = choose(asked, machine)
    if asked != "auto" or choice.kind != "tensorrt":
        return choice
    try:
        for device in kinds_of_gpus(choice, manifest):
            library, version = str(choice.library), machine.tensorrt_version
            usable_plans(folder, manifest, library, version, device.capability, device.alone)
    except ModelError as error:
        others = {name: number for name, number in machine.packages.items() if name not in TENSORRT}
        next_best = choose("auto", Machine(machine.probe, others))
        return replace(next_best, reason=f"{next_best.reason}; not TensorRT: {error}")
    return choice


def kinds_of_gpus(choice: Choice, manifest: AnyManifest) -> list[CudaDevice]:
    """One GPU of each kind that a version would run on."""
    used = choice.devices[:1] if isinstance(manifest, PooledManifest) else choice.devices
    kinds: dict[str, CudaDevice] = {}
    for device in used:
        kinds.setdefault(device.capability, device)
    return list(kinds.values())
