"""The few CUDA nouns that ROSE needs, one a file, each with a CPU stand-in. Knows no torch and no model."""
