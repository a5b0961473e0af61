"""Rows written to page-locked host memory by the forward itself, which spares a step the launch of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def deliver(address: Tensor, words: Tensor, vectors: tuple[int, int]) -> None:
    """Copy `words` i32[N] to the address in `address` i64[1], nowhere if that is 0. Needs Triton.

    vectors: S and D; the words begin with vectors f32[S, D]. Their sums of squares f32[S] follow the last
    word: by them the host knows whether vectors are finite, and how long, without reading them.
    The address is read when the kernel runs, so a captured graph delivers each replay to another place. It is
    of memory that the device may write, page-locked on the host, with room for 4 (N + S) bytes.
    """
    from rose.kernels.jit import delivery as jit

    jit.deliver(address, words, vectors)
