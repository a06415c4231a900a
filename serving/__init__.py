"""The server: a model repository, an engine that batches and searches, and the doors to it."""
