"""Builds attention kernels ahead of time: `python -m rose.aot`."""
