"""GELU in a product's epilogue by one exponential: 10 instructions a value with its bias, where erf takes 17.

Imported by a build only: needs quack-kernels. Beside tensor cores that draw all the power there is, what an
epilogue computes costs time even where it is hidden behind another tile's product.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="import-not-found,import-untyped,misc,no-any-return"
# Functions are traced: their parameters are the DSL's.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.activation import mlir_math

from rose.aot.gelu_polynomial import COEFFICIENTS, LARGEST_SQUARE


def gelu(x):
    """x / (1 + 2^(x * p(x²))); see `gelu_polynomial`."""
    square = cutlass.min(x * x, Float32(LARGEST_SQUARE))
    first, second, third = COEFFICIENTS
    inner = x * (first + square * (second + square * third))
    return x * mlir_math.rcp(cute.math.exp2(inner, fastmath=True) + 1.0, approx=True, ftz=True)
