"""What stands for erf in the epilogues of products, held to erf."""

from __future__ import annotations

import numpy as np
import torch

from rose.aot.gelu_polynomial import COEFFICIENTS, LARGEST_SQUARE


def epilogue_gelu(x: np.ndarray) -> np.ndarray:
    """As the epilogue computes it, in float32 throughout."""
    x = x.astype(np.float32)
    first, second, third = (np.float32(one) for one in COEFFICIENTS)
    with np.errstate(over="ignore"):
        square = np.minimum(x * x, np.float32(LARGEST_SQUARE))
        return np.asarray(x / (1 + np.exp2(x * (first + square * (second + square * third)))))


def exact_gelu(x: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(x.astype(np.float64))).numpy()


def test_it_is_erf_s_within_a_fraction_of_what_bf16_can_tell() -> None:
    x = np.linspace(-50, 50, 1_000_001)
    assert np.abs(epilogue_gelu(x) - exact_gelu(x)).max() < 3e-5
    # From 1/64 on, half a step of bf16 is larger than that.
    y = exact_gelu(x)
    large = np.abs(y) >= 2**-6
    assert (np.abs(epilogue_gelu(x) - y)[large] < np.abs(y)[large] * 2**-9).all()


def test_its_ends_are_those_of_gelu() -> None:
    x = np.array([-3e38, -1e4, -40.0, -0.0, 0.0, 40.0, 1e4, 3e38])
    np.testing.assert_array_equal(epilogue_gelu(x), [0, 0, 0, 0, 0, 40, np.float32(1e4), np.float32(3e38)])
    assert np.isnan(epilogue_gelu(np.array([np.nan]))).all()
