"""The proof that an exported model is the one that was brought: comparisons with the original, and `parity.json`."""
