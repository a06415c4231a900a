"""The PyTorch side of a model: modules written to be trained, compared and exported."""
