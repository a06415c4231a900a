"""Graph in, graph out: a verified graph in another precision, and scales for its activations."""
