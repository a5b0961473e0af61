"""The few CUDA nouns that ROSE needs, one a file, and stand-ins of the CPU for them. Knows no torch and no model."""
