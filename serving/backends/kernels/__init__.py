"""CUDA kernels of our own, as source and as PTX."""
