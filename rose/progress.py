"""Bars on stderr for what takes long: downloads, loading, captures. Nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    import torch

    from rose.weights import Shape, WeightSource

# What is done sooner shows no bar.
DELAY_S = 0.5


class Bar(tqdm):  # type: ignore[misc]
    """tqdm with what all bars here have in common; a class, since huggingface_hub makes bars of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # disable=None: silent when the file is no terminal.
        ours = {"file": sys.stderr, "disable": None, "dynamic_ncols": True, "leave": False, "delay": DELAY_S}
        super().__init__(*args, **(ours | options))


# tqdm's own lock is one between processes, for which Python may start a process.
Bar.set_lock(RLock())


class _ShownWeights:
    """Tells `bar` of every tensor."""

    def __init__(self, stored: WeightSource, bar: Bar) -> None:
        self._stored = stored
        self._bar = bar

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """See WeightSource.tensor."""
        tensor = self._stored.tensor(name, shape)
        self._bar.update(tensor.nbytes)
        return tensor


@contextmanager
def shown(stored: WeightSource, total_bytes: int | None) -> Iterator[WeightSource]:
    """`stored` with a bar, which ends with the block. total_bytes: of all its tensors; None: not known."""
    with Bar(desc="loading weights", total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield _ShownWeights(stored, bar)
