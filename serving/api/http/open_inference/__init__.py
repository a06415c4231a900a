"""The open inference protocol over HTTP: KServe's v2 in JSON, with Triton's extensions."""
