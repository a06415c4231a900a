"""Which models are served: the repository, settings, loading and unloading."""
