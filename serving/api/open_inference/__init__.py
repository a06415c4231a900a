"""The open inference API: KServe's protocol version 2 with Triton's extensions, over the same models."""
