"""Whether a library's error says that it got no memory, which costs one request; any other one costs a step."""

from __future__ import annotations

import re

# TensorRT and ONNX Runtime in their own words, CUDA's, or its other libraries'. They speak of memory in other troubles,
# too: of an illegal access, or of memory that we did not give them.
_NO_MEMORY = re.compile(
    r"out.?of.?memory|insufficient memory|not enough (free |device |gpu )?memory|bad_alloc|alloc_failed|"
    r"could not be allocated|(can ?not|can't|could not|couldn't|unable to|failed to) allocate|"
    r"memory allocation.{0,40} failed|ErrorMemoryAllocation|"
    r"is smaller than requested bytes|failed to find a free memory block",  # of an arena with gpu_mem_limit
    re.IGNORECASE,
)


def is_about_memory(why: str) -> bool:
    return _NO_MEMORY.search(why) is not None
