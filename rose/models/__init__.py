"""One file an architecture: wiring only."""
