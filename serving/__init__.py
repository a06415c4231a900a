"""The server: a model repository, an engine that batches and searches, and the APIs to it."""

import os

# ONNX Runtime's official builds report what they run to their maker, over the network, and write a device id into the
# home directory, unless this is set before they are imported. Whoever wants that sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
