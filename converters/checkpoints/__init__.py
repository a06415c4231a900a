"""Reading what a user brings: weights, configurations, tokenizers and text. No code of a checkpoint ever runs."""
