"""Metrics, logs and traces, for operators."""
