"""Which GPUs plans are built for, and by which library."""

from __future__ import annotations

from collections.abc import Sequence

from beamline.converters.tensorrt.library import Library
from beamline.serving.backends.probe import CudaDevice
from beamline.serving.backends.selection import Machine
from beamline.serving.errors import ConversionError

CAPABILITIES = ("80", "86", "89", "120")


def library_of(machine: Machine, asked: str | None) -> str | None:
    """By which library, where none was named: the one with which a server on this machine would run the plans. None,
    so the first that can be loaded, where there is no GPU, or where plans are for other GPUs, too: only tensorrt-rtx
    builds those."""
    here = {device.capability for device in machine.usable}
    return machine.tensorrt if here and here.issuperset(_numbers(asked)) else None


def checked_capabilities(text: str | None, library: Library, present: Sequence[CudaDevice]) -> tuple[str, ...]:
    """`80,86`, or what makes sense without a word: the GPUs that are there, else all that are common."""
    if text is None:
        return _usual(library, present)
    wanted = _numbers(text)
    wrong = [part for part in wanted if not part.isdigit()]
    if wrong or not wanted:
        raise ConversionError(f"--compute-capability {text!r}: numbers such as 80,86,89,120 are expected")
    if not library.ahead_of_time and wanted != _usual(library, present):
        raise ConversionError(
            f"tensorrt builds only for the GPU that is there ({present[0].capability}): {_otherwise(wanted, present)}"
        )
    return wanted


def _otherwise(wanted: Sequence[str], present: Sequence[CudaDevice]) -> str:
    """How to build for other GPUs than the first one."""
    others = {device.capability: device for device in reversed(present) if device.alone}
    ways = [
        f"for {each}, {others[each].alone}beamline build ... --compute-capability {each}"
        for each in wanted
        if each in others
    ]
    elsewhere = set(wanted) - {device.capability for device in present}
    return "; ".join([*ways, *(["for GPUs that are not here, --library tensorrt_rtx"] if elsewhere else [])])


def _numbers(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip().replace(".", "") for part in (text or "").split(",") if part.strip()))


def _usual(library: Library, present: Sequence[CudaDevice]) -> tuple[str, ...]:
    """A server wants plans for each of its GPUs; `tensorrt` builds for the first one alone."""
    if library.ahead_of_time:
        kinds = {device.capability for device in present}
        return tuple(sorted(kinds, key=int)) or CAPABILITIES
    if not present:
        raise ConversionError("tensorrt builds on the GPU itself, and there is none here; use tensorrt-rtx")
    if present[0].number:
        raise ConversionError(
            "tensorrt builds for the first GPU that it sees, and that one is too old to be served on: run "
            f"{present[0].alone}beamline build ..."
        )
    return (present[0].capability,)
