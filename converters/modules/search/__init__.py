"""The search at the end of a step graph: beams, samples, and the tree that the KV cache holds."""
