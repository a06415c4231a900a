"""Whether ONNX Runtime really appends to a cache in place.

Nothing in its API tells; but its TensorScatter kernel logs a warning when it was given two buffers and has to copy the
whole cache. That log goes to the process's standard error, so we listen there while a graph runs once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from beamline.serving.errors import ModelError

_COMPLAINT = b"in-place optimization not activated"


def refuse_copies(run: Callable[[], object]) -> None:
    """Runs it, and raises a `ModelError` if the runtime said that it copied a cache."""
    said = _standard_error_during(run)
    if _COMPLAINT in said:
        raise ModelError("ONNX Runtime copies the caches at every step instead of updating them in place")


def _standard_error_during(run: Callable[[], object]) -> bytes:
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            run()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        said = file.read()
    if _COMPLAINT not in said and said:
        os.write(2, said)  # what else it had to say still belongs there
    return said
