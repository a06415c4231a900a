"""The errors of server and converters. Those of the public API stand in `beamline/errors.py`.

    BeamlineError                   something went wrong that we can name
    ├── RequestError                the caller can mend it; the text is shown to the client
    │   ├── InvalidRequest          a field has a value that is not allowed
    │   ├── ModelNotFound           no such model or version here
    │   ├── ModelUnavailable        the model is known, but not served now
    │   ├── Overloaded              no room now; try again later, and it may say when
    │   ├── Unimplemented           a method that this server does not have
    │   ├── Unauthenticated         no credentials, or none that we know
    │   ├── Forbidden               the credentials are known, but not for this
    │   ├── ShuttingDown            the server drains; another one will answer
    │   ├── SlowReader              a stream's reader fell too far behind
    │   ├── DeadlinePassed          the caller's deadline was over before the answer was there
    │   └── Cancelled               the caller does not want the answer any more
    ├── ComputeError                this request failed on the device; the others go on
    │   └── DeviceLost              the device answers nothing any more; the process has to end
    ├── ModelError                  a model on disk can't be served; names the file
    │   ├── OutOfMemory             the device has too little memory left for it
    │   └── ManifestError           its manifest is broken, or of a format that we don't know
    └── ConversionError             a checkpoint can't be converted
        ├── UnsupportedCheckpoint   with every reason at once
        └── ParityFailure           the exported graphs disagree with PyTorch

The status that a client gets for each stands in `serving/api/status.py`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence


class BeamlineError(Exception):
    pass


class RequestError(BeamlineError):
    pass


class InvalidRequest(RequestError):
    pass


class ModelNotFound(RequestError):
    pass


class ModelUnavailable(RequestError):
    pass


class _RetryHint(BeamlineError):
    def __init__(self, sentence: str, retry_after: float | None = None) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after  # seconds; None where it is not known


class Overloaded(RequestError, _RetryHint):
    pass


class Unimplemented(RequestError):
    pass


class Unauthenticated(RequestError):
    pass


class Forbidden(RequestError):
    pass


class ShuttingDown(RequestError, _RetryHint):
    pass


class SlowReader(RequestError):
    pass


class DeadlinePassed(RequestError):
    pass


class Cancelled(RequestError):
    pass


class ComputeError(BeamlineError):
    pass


class DeviceLost(ComputeError):
    pass


class ModelError(BeamlineError):
    pass


class OutOfMemory(ModelError):
    pass


class ManifestError(ModelError):
    pass


class ConversionError(BeamlineError):
    pass


class UnsupportedCheckpoint(ConversionError):
    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{what} can't be converted:{lines}")


class ParityFailure(ConversionError):
    pass
