"""From a PyTorch checkpoint to a model version."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before any runtime is imported: see `serving/__init__.py`
