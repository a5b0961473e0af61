"""The few CUDA nouns that ROSE needs, one a file, some with a stand-in. Knows no torch and no model."""
