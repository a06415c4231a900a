"""The HTTP door: metrics and health."""
