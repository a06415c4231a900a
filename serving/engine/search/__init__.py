"""The host's half of beam search and sampling, and logits processors."""
