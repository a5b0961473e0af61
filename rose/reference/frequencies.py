"""Rotation past the length that a model was trained for, frequency by frequency, as the papers have it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rose.configs.rope import LinearScaling, Llama3Scaling, YarnScaling

if TYPE_CHECKING:
    from rose.configs.rope import RopeScaling


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """D/2 radians a token."""
    scaled = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2.0 * pair / head_dim)
        if isinstance(scaling, LinearScaling):
            share = 1.0
        elif isinstance(scaling, Llama3Scaling):
            share = _llama3_share(frequency, scaling)
        else:
            share = _yarn_share(pair, head_dim, theta, scaling)
        scaled.append((1.0 - share) * frequency + share * frequency / scaling.factor)
    return scaled


def _llama3_share(frequency: float, scaling: Llama3Scaling) -> float:
    """How much of a frequency is divided. Source: Llama 3.1's apply_scaling."""
    wavelength = 2.0 * math.pi / frequency
    if wavelength < scaling.original_positions / scaling.high_turns:
        return 0.0
    if wavelength > scaling.original_positions / scaling.low_turns:
        return 1.0
    smooth = scaling.original_positions / wavelength - scaling.low_turns
    return 1.0 - smooth / (scaling.high_turns - scaling.low_turns)


def _yarn_share(pair: int, head_dim: int, theta: float, scaling: YarnScaling) -> float:
    """How much of a frequency is divided. Source: Peng et al., arXiv 2309.00071, rounded as there."""

    def place(turns: float) -> float:
        ratio = scaling.original_positions / (2.0 * math.pi * turns)
        return head_dim * math.log(ratio) / (2.0 * math.log(theta))

    low, high = place(scaling.fast_turns), place(scaling.slow_turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high = low + 0.001
    return min(max((pair - low) / (high - low), 0.0), 1.0)
