"""The command `beamline` over the stub CUDA libraries: what its searches see of a step is made plausible."""

from __future__ import annotations

import sys

from beamline.serving.cli import main
from tests.support.cuda_stub.plausible import make_plausible

if __name__ == "__main__":
    make_plausible()
    sys.exit(main())
