"""Sending: when, which requests, and the worker processes that send them and keep the times."""
