"""CUDA C++ kernels, built by `python -m rose.kernels.cuda.build`, launched through the driver."""
