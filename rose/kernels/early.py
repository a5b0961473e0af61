"""Whether a kernel is brought up while the one before it still runs: programmatic dependent launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum

import torch

from rose.kernels import dispatch

# With more tokens kernels are longer than a launch, and one that waits takes room from the one that runs; but
# for products whose blocks leave room (`gains`).
MAX_TOKENS = 128
CAPABILITY = (9, 0)


class Early(IntEnum):
    """When a kernel lets the one after it be brought up; that one still waits before it reads or writes.

    NO: when it is done. AT_ONCE: when it starts. AFTER_WAIT: when the one before it is done.
    """

    NO = 0
    AT_ONCE = 1
    AFTER_WAIT = 2


def early_for(num_tokens: int, fetches: bool, device: torch.device, gains: bool = False) -> Early:
    """How kernels of a forward are launched. fetches: whether a product fetches its weight before it waits.

    gains: whether its products were measured to gain (`rose.kernels.fused.gains_early`).

    Measured on an H200 in µs a forward (pplx-embed-0.6b). With such products, 16 tokens, without attention:
    NO 782, AT_ONCE 553. Without them AT_ONCE loses (845); AFTER_WAIT, with attention, makes 960 of 16 tokens
    844, 1034 of 128 979, but 1310 of 256 1367. Where products gain, from 512 tokens on, AT_ONCE saved at most
    0.25 a layer more than AFTER_WAIT, and cost 1.7 more at 1536.
    """
    if not _can_launch_early(device):
        return Early.NO
    if fetches:
        return Early.AT_ONCE
    return Early.AFTER_WAIT if gains or num_tokens <= MAX_TOKENS else Early.NO


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    if device.type != "cuda" or not dispatch.has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


_current: ContextVar[Early] = ContextVar("early", default=Early.NO)


def current() -> Early:
    """How a kernel enqueued now is launched."""
    return _current.get()


@contextmanager
def launching(early: Early) -> Iterator[None]:
    """Kernels enqueued inside are launched so."""
    token = _current.set(early)
    try:
        yield
    finally:
        _current.reset(token)
