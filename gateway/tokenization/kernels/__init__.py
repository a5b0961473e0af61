"""Tokenisers compiled to machine code by numba. Imported only for a tokenizer.json that they serve."""
