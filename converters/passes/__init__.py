"""Graph in, graph out: what changes exported graphs on their way to a device."""
