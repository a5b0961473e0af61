"""Fused elementwise operations and small products: a plain PyTorch version and a Triton kernel of each."""
