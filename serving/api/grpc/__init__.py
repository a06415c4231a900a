"""The gRPC door: `beamline.v1`, health and reflection."""
