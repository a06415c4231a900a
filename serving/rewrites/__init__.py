"""Graph rewrites at load: what makes a portable graph fast on the CPU or on a GPU."""
