"""What attention kernels have to do for a batch, listed on the device from its offsets.

Tiles of query rows, those that see most first. A tile's place in that order is counted, not sorted: how many
tiles of all sequences see more. The lists may so be written by a kernel in a CUDA graph, of any lengths.
"""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import block_of, ceil_div, device_function, kernel, launch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from rose.attention.work_list import Fa2List, Fa3List

# Tiles a program, and sequences that it looks at together.
_TILES, _SEQUENCES = 32, 128
_NO_CHUNKS = 2**31 - 1


@device_function
def _lengths(cu_seqlens_ptr, num_seqs, first, SEQUENCES: tl.constexpr):
    """Numbers and lengths of the sequences from `first` on; past the last they are empty."""
    at = first + tl.arange(0, SEQUENCES)
    real = at < num_seqs
    start = tl.load(cu_seqlens_ptr + at, mask=real, other=0)
    return at, tl.load(cu_seqlens_ptr + at + 1, mask=real, other=0) - start


@device_function
def _tiles_of(lengths, tile_rows, group):
    return (lengths * group + tile_rows - 1) // tile_rows


@device_function
def _tiles(cu_seqlens_ptr, num_seqs, numbers, tile_rows, group, SEQUENCES: tl.constexpr):
    """Of tiles by their numbers in order of the offsets: sequence, number in it; and how many there are."""
    sequence, first = numbers * 0, numbers * 0
    total = 0
    for start in range(0, num_seqs, SEQUENCES):
        at, lengths = _lengths(cu_seqlens_ptr, num_seqs, start, SEQUENCES)
        tiles = _tiles_of(lengths, tile_rows, group)
        ends = total + tl.cumsum(tiles, 0)
        passed = (ends[None, :] <= numbers[:, None]) & (at < num_seqs)[None, :]
        sequence += tl.sum(passed.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(passed, ends[None, :], 0), 1))
        total += tl.sum(tiles, 0)
    return sequence, numbers - first, total


@device_function
def _order(
    cu_seqlens_ptr, num_seqs, sequence, tile, length, tile_rows, group,
    CAUSAL: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """How many tiles come before each: those that see more keys, and of as many those of earlier sequences.

    CAUSAL: a tile sees the keys up to its own end; else all tiles of a sequence see as many, in their order.
    """
    before = sequence * 0
    seen = tl.minimum(length, (tile + 1) * tile_rows) if CAUSAL else length
    for start in range(0, num_seqs, SEQUENCES):
        at, lengths = _lengths(cu_seqlens_ptr, num_seqs, start, SEQUENCES)
        others, tiles = lengths[None, :], _tiles_of(lengths, tile_rows, group)[None, :]
        here = seen[:, None]
        if CAUSAL:
            whole = here // tile_rows
            more = tl.maximum(tiles - 1 - whole, 0) + (others > here).to(tl.int32)
            as_many = ((here % tile_rows == 0) & (whole < tiles)) | (others == here)
            same = as_many.to(tl.int32)
        else:
            more = tl.where(others > here, tiles, 0)
            same = tl.where(others == here, tiles, 0)
        earlier = at[None, :] < sequence[:, None]
        before += tl.sum(more + tl.where(earlier, same, 0), 1)
    if not CAUSAL:
        before += tile
    return before


@device_function
def _begin(block, turns, rest, BLOCKS: tl.constexpr):
    """Where the list of a block begins, if in the last turn `rest` places are dealt out, all to and fro."""
    extra = tl.where(turns % 2 == 0, tl.minimum(block, rest), tl.maximum(block - (BLOCKS - rest), 0))
    return block * turns + extra


@device_function
def _shortest(cu_seqlens_ptr, num_seqs, SEQUENCES: tl.constexpr):
    """The least length of a sequence that is not empty; without one, more than any."""
    least = 0x7FFFFFFF
    for start in range(0, num_seqs, SEQUENCES):
        _, lengths = _lengths(cu_seqlens_ptr, num_seqs, start, SEQUENCES)
        least = tl.minimum(least, tl.min(tl.where(lengths > 0, lengths, 0x7FFFFFFF), 0))
    return least


@device_function
def _store_works(list_ptr, capacity, at, tile, start, length, head, sequence, mask):
    """Works at their places. tile: of each work or of its row; start, length, sequence: of its row."""
    zero = at * 0
    to = list_ptr + at
    tl.store(to, tile + zero, mask=mask)
    tl.store(to + capacity, start[:, None] + zero, mask=mask)
    tl.store(to + 2 * capacity, length[:, None] + zero, mask=mask)
    tl.store(to + 3 * capacity, head + zero, mask=mask)
    tl.store(to + 4 * capacity, sequence[:, None] + zero, mask=mask)


@device_function
def _dealt(turn, place, turns, rest, BLOCKS: tl.constexpr):
    """Where in the list the work is that is dealt out at that place of a turn."""
    block = tl.where(turn % 2 == 0, place, BLOCKS - 1 - place)
    return _begin(block, turns, rest, BLOCKS) + turn


@kernel("cu_seqlens_ptr", "list_ptr", "num_seqs", "capacity")
def _fa3_list(
    cu_seqlens_ptr,
    list_ptr,
    num_seqs,
    capacity,
    TILE_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HALVES: tl.constexpr,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    numbers = tl.program_id(0) * TILES + tl.arange(0, TILES)
    sequence, tile, total = _tiles(cu_seqlens_ptr, num_seqs, numbers, TILE_ROWS, 1, SEQUENCES)
    real = numbers < total
    start = tl.load(cu_seqlens_ptr + sequence, mask=real, other=0)
    length = tl.load(cu_seqlens_ptr + sequence + 1, mask=real, other=0) - start
    before = _order(cu_seqlens_ptr, num_seqs, sequence, tile, length, TILE_ROWS, 1, CAUSAL, SEQUENCES)
    head = tl.arange(0, HEAD_BLOCK)[None, :]
    work, works = before[:, None] * HEADS + head, total * HEADS
    if not CAUSAL:
        # Head by head: blocks that run at once then have the same keys, which are fetched with less power.
        tiles = _tiles_of(length, TILE_ROWS, 1)
        work = ((before - tile) * HEADS + tile)[:, None] + head * tiles[:, None]
    turn, place = work // BLOCKS, work % BLOCKS
    turns, rest = works // BLOCKS, works % BLOCKS
    mask = real[:, None] & (head < HEADS)
    tile = tile[:, None]
    if HALVES:
        # Two share the keys of each half: only where all have two tiles or more of them.
        splits = (2 * rest <= BLOCKS) & (_shortest(cu_seqlens_ptr, num_seqs, SEQUENCES) > TILE_ROWS)
        halved = splits & (turn == turns)
        place = tl.where(halved, 2 * place, place)
        rest = tl.where(splits, 2 * rest, rest)
        second = _dealt(turn, place + 1, turns, rest, BLOCKS)
        there = mask & halved
        _store_works(list_ptr, capacity, second, -2 * tile - 2, start, length, head, sequence, there)
        tile = tl.where(halved, -2 * tile - 1, tile)
    at = _dealt(turn, place, turns, rest, BLOCKS)
    _store_works(list_ptr, capacity, at, tile, start, length, head, sequence, mask)
    if tl.program_id(0) == 0:
        blocks = tl.arange(0, BLOCK_ENDS)
        begins = _begin(blocks, turns, rest, BLOCKS)
        tl.store(list_ptr + 5 * capacity + blocks, begins, mask=blocks <= BLOCKS)


@kernel("cu_seqlens_ptr", "list_ptr", "valid_ptr", "num_seqs", "capacity", "tile_rows")
def _fa2_list(
    cu_seqlens_ptr,
    list_ptr,
    valid_ptr,
    num_seqs,
    capacity,
    tile_rows,
    GROUP: tl.constexpr,
    NO_CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    numbers = tl.program_id(0) * TILES + tl.arange(0, TILES)
    sequence, tile, total = _tiles(cu_seqlens_ptr, num_seqs, numbers, tile_rows, GROUP, SEQUENCES)
    real = numbers < total
    start = tl.load(cu_seqlens_ptr + sequence, mask=real, other=0)
    length = tl.load(cu_seqlens_ptr + sequence + 1, mask=real, other=0) - start
    before = _order(cu_seqlens_ptr, num_seqs, sequence, tile, length, tile_rows, GROUP, False, SEQUENCES)
    tl.store(list_ptr + before, sequence, mask=real)
    tl.store(list_ptr + capacity + before, tile, mask=real)
    tl.store(list_ptr + 2 * capacity + before, tile * 0, mask=real)
    tl.store(valid_ptr + numbers, real.to(tl.int8), mask=numbers < capacity)
    if tl.program_id(0) == 0:
        rows_ptr = list_ptr + 3 * capacity
        for first in range(0, num_seqs + 1, SEQUENCES):
            at = first + tl.arange(0, SEQUENCES)
            tl.store(rows_ptr + at, tl.load(cu_seqlens_ptr + at, mask=at <= num_seqs), mask=at <= num_seqs)
        tl.store(rows_ptr + num_seqs + 1, NO_CHUNKS)
        tl.store(rows_ptr + num_seqs + 2, tl.load(cu_seqlens_ptr + num_seqs))


def write_fa3_list(cu_seqlens: Tensor, plan: Fa3List, workspace: Tensor) -> None:
    """See rose.attention.work_list.Fa3List.write."""
    import torch

    launch(
        _fa3_list,
        (ceil_div(plan.tiles, _TILES),),
        cu_seqlens,
        workspace[: plan.nbytes].view(torch.int32),
        len(cu_seqlens) - 1,
        plan.capacity,
        TILE_ROWS=plan.tile_rows,
        HEADS=plan.heads,
        HEAD_BLOCK=block_of(plan.heads),
        BLOCKS=plan.blocks,
        BLOCK_ENDS=block_of(plan.blocks + 1),
        CAUSAL=plan.causal,
        HALVES=plan.halves,
        TILES=_TILES,
        SEQUENCES=_SEQUENCES,
        num_warps=4,
    )


def write_fa2_list(cu_seqlens: Tensor, plan: Fa2List, workspace: Tensor) -> None:
    """See rose.attention.work_list.Fa2List.write."""
    import torch

    launch(
        _fa2_list,
        (ceil_div(plan.tiles, _TILES),),
        cu_seqlens,
        workspace[: plan.valid_at].view(torch.int32),
        workspace[plan.valid_at :].view(torch.int8),
        len(cu_seqlens) - 1,
        plan.tiles,
        plan.tile_rows,
        GROUP=plan.group,
        NO_CHUNKS=_NO_CHUNKS,
        TILES=_TILES,
        SEQUENCES=_SEQUENCES,
        num_warps=4,
    )
