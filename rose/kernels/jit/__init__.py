"""The Triton kernels. Imported only where Triton is installed and a tensor is on a GPU, or by tests.

bf16 is loaded, cast to fp32, computed on, and cast at the store: Triton's interpreter has no bf16 arithmetic.
Loops with bounds known only at run time are `while`: the interpreter of 3.6 fails on `range` under numpy 2.4.
"""
