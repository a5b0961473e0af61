"""How `rose.kernels.jit.flat_attention` divides its work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """One way to divide the work.

    block_m: query rows of a program, tokens times heads. heads: query heads of a program, all of one
    key/value head. block_n: keys at a time. warps: of 32 threads. stages: tiles of keys in flight.
    """

    block_m: int
    block_n: int
    heads: int
    warps: int
    stages: int
