"""The server under test: the protocols that it is called by, and its metrics."""
