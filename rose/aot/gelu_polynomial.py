"""The polynomial by which an exponential gives GELU: numbers alone, which a build and its tests share."""

from __future__ import annotations

from math import e, log2

# q in gelu(x) = x / 2 * (1 + tanh(x * q(x²))), of rising powers. Fitted by Nelder-Mead to the greatest error
# of GELU, 2.6e-5, for |x| <= 8; the usual form with tanh, whose q has two coefficients, is off by 4.7e-4.
_TANH = (0.797507884, 0.0370056462, -0.000351516809)
# p in gelu(x) = x / (1 + 2^(x * p(x²))), which is the same.
COEFFICIENTS = tuple(-2 * log2(e) * one for one in _TANH)
# Beyond, q would fall again. There its tanh is 1 to the last bit either way.
LARGEST_SQUARE = 36.0
