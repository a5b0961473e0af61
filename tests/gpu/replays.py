"""A kernel's case captured once and replayed with other lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from tests.gpu.loaded_model import nothing_allocated


class Case(Protocol):
    """A batch of up to 16 sequences whose lengths may be changed."""

    def set(self, lengths: list[int]) -> None: ...

    def run(self) -> None: ...


def replays_of(case: Case, num_tokens: int) -> Iterator[list[int]]:
    """The lengths of each replay, when it is done; captured with one sequence, allocating nothing."""
    case.set([num_tokens])
    case.run()
    with nothing_allocated():
        case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    most = num_tokens - 15
    for lengths in ([num_tokens], [1] * 16, [0, most, 0, 3], [num_tokens // 16] * 16, [1] * 15 + [most], []):
        case.set(lengths)
        graph.replay()
        yield lengths
