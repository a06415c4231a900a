"""The server: a model repository, an engine that batches and searches, and the APIs to it."""

import os

# ONNX Runtime's official builds report what they run to their maker, over the network, and write a device id into the
# home directory, unless this is set before they are imported. Whoever wants that sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# gRPC's own library writes lines of its own kind to standard error for every failed handshake and every port that is
# taken: neither JSON nor ours. What they are about is said in a sentence where it happens.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
