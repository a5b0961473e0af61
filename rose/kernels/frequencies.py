"""Which frequencies a rotation has: the plain ones, or those of a scaled kind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rose.configs.rope import LinearScaling, Llama3Scaling, YarnScaling

if TYPE_CHECKING:
    from torch import Tensor

    from rose.configs.rope import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """f64[D/2] radians a token, falling.

    Source: transformers' ROPE_INIT_FUNCTIONS, which compute in f32.
    """
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    kept = _llama3_kept(plain, scaling) if isinstance(scaling, Llama3Scaling) else _yarn_kept(plain, scaling)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def _llama3_kept(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """f64[D/2] in [0, 1]: the share of each frequency that stays as it is. By its turns."""
    turns = plain * scaling.original_positions / (2.0 * math.pi)
    return ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0.0, 1.0)


def _yarn_kept(plain: Tensor, scaling: YarnScaling) -> Tensor:
    """f64[D/2], as for Llama 3. By its place. Source: Peng et al., arXiv 2309.00071, section 3.2."""
    places = torch.arange(len(plain), dtype=torch.float64)
    step = -math.log(plain[1]) if len(plain) > 1 else 1.0  # of the logarithm, from place to place
    first, last = (
        math.log(scaling.original_positions / (turns * 2.0 * math.pi)) / step
        for turns in (scaling.fast_turns, scaling.slow_turns)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    if first == last:
        last += 0.001  # as there: a step instead of a ramp
    return 1.0 - ((places - first) / (last - first)).clamp(0.0, 1.0)
