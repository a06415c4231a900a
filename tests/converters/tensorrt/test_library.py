"""What TensorRT says while it builds: what fails a build, and what is only told."""

from __future__ import annotations

import logging

import pytest

from beamline.converters.tensorrt.build import CURRENT, BuildFailure, build
from beamline.converters.tensorrt.graph import Graph
from tests.support.tensorrt_builder import PLAN, SIZES, scripted

# As TensorRT 8 to 10 have said it on GPUs, beside plans that were good.
SKIPPED = (
    "Error Code: 9: Skipping tactic 0xaa15e43058248292 due to exception canImplement1",
    "Error Code: 9: Skipping tactic 0xfe80445f7bb61a99 due to exception Assertion vol == 1 failed.",
    "2: [virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (no further information)",
    "[defaultAllocator.cpp::allocate::19] Error Code 1: Cuda Runtime (out of memory)",
    "Requested amount of GPU memory (4294967296 bytes) could not be allocated. There may not be enough free memory "
    "for allocation to succeed.",
    "Skipping tactic 3 due to insufficient memory on requested size of 4294967296 detected for tactic 0x04.",
    "Tactic Device request: 2304MB Available: 1536MB. Device memory is insufficient to use tactic.",
)


@pytest.mark.parametrize("message", SKIPPED)
def test_a_plan_is_good_without_the_kernels_that_were_skipped(
    relu: Graph, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = scripted(building=(("ERROR", message), ("ERROR", message)))
    with caplog.at_level(logging.WARNING, "beamline.converters"):
        assert build(relu, SIZES, library, CURRENT).content == PLAN
    (record,) = caplog.records
    assert "TensorRT reported 2 errors, the first: " + message in record.getMessage()


def test_what_was_skipped_is_the_reason_where_there_is_no_plan(relu: Graph) -> None:
    with pytest.raises(BuildFailure) as failure:
        build(relu, SIZES, scripted(building=tuple(("ERROR", each) for each in SKIPPED), plan=None), CURRENT)
    assert failure.value.reasons == list(SKIPPED)


@pytest.mark.parametrize(
    ("severity", "message"),
    [
        ("ERROR", "Error Code 4: Internal Error (Network validation failed.)"),
        ("INTERNAL_ERROR", "Assertion engine failed."),
        ("WARNING", "Unused Input: lengths"),
        ("INFO", "Unused Input: lengths"),
    ],
)
def test_any_other_error_fails_a_build_that_gave_a_plan(relu: Graph, severity: str, message: str) -> None:
    said = ((severity, message), ("ERROR", SKIPPED[0]))
    with pytest.raises(BuildFailure) as failure:
        build(relu, SIZES, scripted(building=said), CURRENT)
    assert failure.value.reasons == [message]


def test_only_the_parsers_warnings_fail_a_build(relu: Graph) -> None:
    """Others are about the driver or the environment."""
    lazy = ("WARNING", "CUDA lazy loading is not enabled. Enabling it can significantly reduce device memory usage.")
    assert build(relu, SIZES, scripted(preparing=(lazy,), building=(lazy,)), CURRENT).content == PLAN
    odd = ("WARNING", "onnxOpImporters.cpp: an attribute is not supported, and left out.")
    for said in (odd, ("ERROR", SKIPPED[0])):  # there are no kernels yet
        with pytest.raises(BuildFailure) as failure:
            build(relu, SIZES, scripted(parsing=(said,)), CURRENT)
        assert failure.value.reasons == [said[1]]
    harmless = ("WARNING", "Make sure input tokens has Int64 binding.")
    assert build(relu, SIZES, scripted(parsing=(harmless,)), CURRENT).content == PLAN
    with pytest.raises(BuildFailure, match="CUDA initialization failure"):
        build(relu, SIZES, scripted(preparing=(("ERROR", "CUDA initialization failure with error: 35"),)), CURRENT)
