"""One file per source of checkpoints. Each only loads; `converters/base.py` does the rest."""
