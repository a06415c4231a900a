"""The gRPC API: `beamline.v1`, health and reflection."""
