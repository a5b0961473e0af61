"""Where attention kernels find their lists of work, and what tells FlashInfer's so.

A list depends on the lengths of a batch; where it lies and how long it may be depends on the number of tokens
and of sequences alone. So a kernel in the graph writes it anew for each batch, and the host plans nothing.
FlashInfer's own planner does it on the host: 0.3 ms for 16 sequences of 512 tokens, 1.3 for 100, and a copy.
Source: flashinfer-python 0.7.2.post1, scheduler.cuh (PrefillPlanInfo, PrefillPlanSM90Info) for the lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rose.attention.base import AttentionSpec

_WORD = 4  # bytes of each number
# Lists of the largest batches: 20 bytes a head for each tile of 128 rows or part of one.
_LIST_BYTES = 12 << 20
# Rows of the query tiles of FlashInfer's kernels: of fa3 by head size, of fa2 packed with its heads.
FA3_ROWS = {64: 192, 128: 128, 256: 128}
_FA2_ROWS, _FA2_FEW_ROWS = 128, 64


def _most_tiles(num_rows: int, num_seqs: int, tile_rows: int) -> int:
    """Of num_rows rows in num_seqs sequences, whatever their lengths."""
    return -(-num_rows // tile_rows) + num_seqs - 1


@dataclass(frozen=True, slots=True)
class Fa3List:
    """A list for each of `blocks` thread blocks, which take its works one after another: of fa3 and chained.

    tiles: of query rows at most; each is a work for every head. causal: tiles differ in what they see.
    halves: works left behind the last whole turn are split in two where at most half of the blocks would get
    one, and all sequences are longer than a tile. Of a half the number of its tile is ~n for the n-th tile
    of half as many rows; it comes last in its block's list, and may lie past its sequence's end.
    """

    tile_rows: int
    tiles: int
    heads: int
    blocks: int
    causal: bool
    halves: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec, tile_rows: int, num_tokens: int, num_seqs: int, blocks: int) -> Fa3List:
        """For num_tokens tokens in num_seqs sequences, padding included, on so many multiprocessors."""
        tiles = _most_tiles(num_tokens, num_seqs, tile_rows)
        return cls(tile_rows, tiles, spec.num_heads, blocks, spec.causal)

    @property
    def capacity(self) -> int:
        """Works at most, of which up to half as many as there are blocks may be split."""
        return self.tiles * self.heads + self.halves * (self.blocks // 2)

    @property
    def nbytes(self) -> int:
        """Of five numbers a work, and where the list of each block begins and ends."""
        return _WORD * (5 * self.capacity + self.blocks + 1)

    @property
    def info(self) -> tuple[int, ...]:
        """PrefillPlanSM90Info: offsets in bytes; queries and keys have the same starts and lengths."""
        tile, start, length, head, sequence, begin = (_WORD * self.capacity * place for place in range(6))
        return (tile, start, start, length, length, head, begin, sequence, 0)

    def write(self, cu_seqlens: Tensor, workspace: Tensor) -> None:
        """Enqueue writing the list of a batch. cu_seqlens: i32[S+1]. workspace: u8[nbytes] or more."""
        from rose.kernels.jit.work_list import write_fa3_list

        write_fa3_list(cu_seqlens, self, workspace)


@dataclass(frozen=True, slots=True)
class Fa2List:
    """One list of tiles; each is a thread block for every key/value head, whose `group` heads are packed."""

    tile_rows: int
    tiles: int
    group: int
    num_tokens: int
    num_seqs: int

    @classmethod
    def of(cls, spec: AttentionSpec, num_tokens: int, num_seqs: int) -> Fa2List:
        """For num_tokens tokens in num_seqs sequences, padding included: low tiles for short sequences."""
        group = spec.num_heads // spec.num_kv_heads
        rows = _FA2_FEW_ROWS if num_tokens * group <= _FA2_FEW_ROWS * num_seqs else _FA2_ROWS
        if spec.head_dim > 128:
            rows = _FA2_FEW_ROWS  # all that its registers take
        return cls(rows, _most_tiles(num_tokens * group, num_seqs, rows), group, num_tokens, num_seqs)

    @property
    def valid_at(self) -> int:
        """Byte at which a byte a tile begins, 1 for those that exist."""
        return _WORD * (3 * self.tiles + self.num_seqs + 3)

    @property
    def nbytes(self) -> int:
        """Of three numbers a tile, the offsets, two numbers more and a byte a tile."""
        return self.valid_at + self.tiles

    @property
    def info(self) -> tuple[int, ...]:
        """PrefillPlanInfo: sizes, offsets in bytes, in graph mode, keys not split."""
        sequence, tile, chunk, rows = (_WORD * self.tiles * place for place in range(4))
        chunk_size = rows + _WORD * (self.num_seqs + 1)
        sizes = (self.tiles, self.num_tokens, chunk_size + _WORD, self.tile_rows)
        return (*sizes, sequence, tile, chunk, 0, rows, chunk_size, 0, 0, self.valid_at, 1, 0)

    def write(self, cu_seqlens: Tensor, workspace: Tensor) -> None:
        """As Fa3List.write."""
        from rose.kernels.jit.work_list import write_fa2_list

        write_fa2_list(cu_seqlens, self, workspace)


class ListMemory:
    """Device memory for the list of one batch at a time. backend: its name, for errors."""

    def __init__(self, backend: str, device: torch.device) -> None:
        import torch

        self._backend = backend
        self.memory = torch.empty(_LIST_BYTES, dtype=torch.uint8, device=device)

    def write(self, made: Fa2List | Fa3List, cu_seqlens: Tensor) -> None:
        """Enqueue writing the list of a batch. cu_seqlens: i32[S+1].

        Raises:
            RuntimeError: it may not fit.
        """
        if made.nbytes > len(self.memory):
            raise RuntimeError(
                f"{self._backend}: the list of {made.tiles} tiles takes {made.nbytes} bytes, more than "
                f"{len(self.memory)}"
            )
        made.write(cu_seqlens, self.memory)
