"""Builds, finds and loads kernels that are compiled ahead of time: `python -m rose.aot` builds them."""
