"""An inference server for sequence models."""
