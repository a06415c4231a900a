"""The HTTP API: the JSON gateway, metrics, health, and web pages."""
