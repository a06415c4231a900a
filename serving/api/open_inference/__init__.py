"""The open inference door: KServe's protocol version 2 with Triton's extensions, over the same models."""
