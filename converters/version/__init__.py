"""A version's files in a model repository."""
