"""The wire contract: `beamline.proto`, and the Python code generated from it (`make proto`)."""
