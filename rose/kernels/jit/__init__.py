"""The Triton kernels. Imported only where Triton is installed and a tensor is on a GPU, or by tests.

bf16 is loaded, cast to fp32, computed on, and cast at the store: Triton's interpreter has no bf16 arithmetic.
"""
