"""Continuous batching and search: requests in, hypotheses out, one `step()` at a time."""
