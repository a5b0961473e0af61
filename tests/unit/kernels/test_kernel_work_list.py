"""Lists of work as the device writes them: complete, once each, longest first, evenly dealt."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.attention.base import AttentionSpec
from rose.attention.work_list import Fa2List, Fa3List

BLOCKS = 6
LENGTHS = {
    "1": [1],
    "whole tiles": [128, 256, 384],
    "one more": [129, 1, 257],
    "empty": [0, 0, 300, 0, 7, 0],
    "none": [0],
    "equal": [512] * 7,
    "many tiny": [1 + i % 5 for i in range(140)],
    "one long": [3, 2, 1500, 4],
}
lengths_of = st.lists(st.integers(0, 700), min_size=1, max_size=12)


def spec_of(heads: tuple[int, int, int], causal: bool = False) -> AttentionSpec:
    return AttentionSpec(*heads, 0.1, causal, torch.bfloat16, torch.device("cpu"))


def offsets_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def written(plan: Fa2List | Fa3List, lengths: list[int], device: str) -> torch.Tensor:
    """The workspace after a batch, of bytes that were 0x55, with room behind it that must stay so."""
    workspace = torch.full((plan.nbytes + 64,), 0x55, dtype=torch.uint8, device=device)
    plan.write(torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device), workspace)
    assert (workspace[plan.nbytes :] == 0x55).all()
    return workspace.cpu()


def numbers(workspace: torch.Tensor, offset: int, count: int) -> list[int]:
    return workspace[offset : offset + 4 * count].view(torch.int32).tolist()


def fa3_works(plan: Fa3List, workspace: torch.Tensor) -> list[list[tuple[int, ...]]]:
    """(sequence, head, tile, start, length) of each work, by thread block."""
    tile, start, key_start, length, key_length, head, begin, sequence, same = plan.info
    assert (start, length, same) == (key_start, key_length, 0)
    begins = numbers(workspace, begin, plan.blocks + 1)
    assert begins[0] == 0
    assert begins == sorted(begins)
    assert begins[-1] <= plan.capacity
    columns = [numbers(workspace, at, begins[-1]) for at in (sequence, head, tile, start, length)]
    works = list(zip(*columns, strict=True))
    return [works[first:last] for first, last in pairwise(begins)]


def expected_works(lengths: list[int], heads: int, rows: int) -> list[tuple[int, ...]]:
    offsets = offsets_of(lengths)
    return sorted(
        (sequence, head, tile, offsets[sequence], length)
        for sequence, length in enumerate(lengths)
        for head in range(heads)
        for tile in range(-(-length // rows))
    )


def check_fa3(lengths: list[int], causal: bool, device: str, padding: int = 0) -> None:
    heads = (3, 3, 64) if causal else (4, 2, 128)
    num_tokens = max(sum(lengths) + padding, 1)
    plan = Fa3List.of(spec_of(heads, causal), 192 if causal else 128, num_tokens, len(lengths), BLOCKS)
    blocks = fa3_works(plan, written(plan, lengths, device))
    assert sorted(work for block in blocks for work in block) == expected_works(
        lengths, heads[0], plan.tile_rows
    )

    def seen(work: tuple[int, ...]) -> int:
        return min(work[4], (work[2] + 1) * plan.tile_rows) if causal else work[4]

    costs = [[seen(work) for work in block] for block in blocks]
    assert all(cost == sorted(cost, reverse=True) for cost in costs)
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    # Dealt to and fro in falling order: no two blocks are further apart than the largest work.
    assert max(map(sum, costs)) - min(map(sum, costs)) <= max(max(cost, default=0) for cost in costs)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_fa3_has_every_work_once(lengths: list[int], causal: bool, device: str) -> None:
    check_fa3([*lengths, 0, 0], causal, device, padding=77)


def test_works_of_full_attention_come_head_by_head(device: str) -> None:
    """Blocks that run at once then read the same keys."""
    lengths = [300, 700, 129, 0, 5]
    plan = Fa3List.of(spec_of((4, 2, 128)), 128, sum(lengths), len(lengths), BLOCKS)
    blocks = fa3_works(plan, written(plan, lengths, device))
    turns = range(max(map(len, blocks)))
    dealt = [blocks[:: -1 if turn % 2 else 1] for turn in turns]
    order = [
        block[turn] for turn, row in zip(turns, dealt, strict=True) for block in row if turn < len(block)
    ]
    by_length = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    assert [work[:3] for work in order] == [
        (sequence, head, tile)
        for sequence in by_length
        for head in range(4)
        for tile in range(-(-lengths[sequence] // 128))
    ]


@given(lengths=lengths_of, causal=st.booleans())
@settings(max_examples=10, deadline=None)
def test_fa3_of_any_lengths(lengths: list[int], causal: bool) -> None:
    check_fa3(lengths, causal, "cuda" if torch.cuda.is_available() else "cpu")


def check_halves(lengths: list[int], heads: int, device: str, padding: int = 0) -> bool:
    """The list with halves is that without, but for a last turn that at most half of the blocks have.

    Returns whether works are split.
    """
    num_tokens = max(sum(lengths) + padding, 1)
    plan = Fa3List.of(spec_of((heads, heads, 64)), 128, num_tokens, len(lengths), BLOCKS)
    split = replace(plan, halves=True)
    without, blocks = (fa3_works(made, written(made, lengths, device)) for made in (plan, split))
    turns, rest = divmod(sum(map(len, without)), BLOCKS)
    if not 0 < 2 * rest <= BLOCKS or any(0 < length <= 128 for length in lengths):
        assert blocks == without
        return False
    order = slice(None, None, -1 if turns % 2 else 1)
    halves = [
        (sequence, head, ~(2 * tile + half), *rows)
        for ((sequence, head, tile, *rows),) in (block[turns:] for block in without[order][:rest])
        for half in (0, 1)
    ]
    assert [block[:turns] for block in blocks] == [block[:turns] for block in without]
    last = [[half] for half in halves] + [[]] * (BLOCKS - 2 * rest)
    assert [block[turns:] for block in blocks[order]] == last
    return True


@pytest.mark.parametrize(
    ("lengths", "heads", "split"),
    [
        # Of 3 works each of 6 blocks gets half of one, the last of which has no rows.
        ([300], 1, True),
        ([0, 0, 300, 0], 1, True),
        ([300], 2, False),
        ([400], 1, False),
        ([512] * 5, 1, True),
        ([512] * 5, 2, False),
        ([512, 400, 300] * 5, 1, True),
        ([129] * 70, 4, True),
        ([129] * 69 + [128], 5, False),
        ([0], 3, False),
    ],
)
def test_works_left_for_half_of_the_blocks_are_split(
    lengths: list[int], heads: int, split: bool, device: str
) -> None:
    assert check_halves([*lengths, 0], heads, device, padding=77) is split


@given(lengths=st.lists(st.just(0) | st.integers(127, 700), min_size=1, max_size=12), heads=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_halves_of_any_lengths(lengths: list[int], heads: int) -> None:
    check_halves(lengths, heads, "cuda" if torch.cuda.is_available() else "cpu")


def check_fa2(lengths: list[int], heads: tuple[int, int, int], device: str, padding: int = 0) -> None:
    num_tokens, group = sum(lengths) + padding, heads[0] // heads[1]
    plan = Fa2List.of(spec_of(heads), max(num_tokens, 1), len(lengths))
    workspace = written(plan, lengths, device)
    tiles, tokens, total_at, rows, sequence_at, tile_at, chunk_at, _, rows_at, size_at, *rest = plan.info
    assert rest == [0, 0, plan.valid_at, 1, 0]
    assert (tokens, rows) == (max(num_tokens, 1), plan.tile_rows)
    valid = workspace[plan.valid_at : plan.valid_at + tiles].tolist()
    expected = [
        (index, tile) for index, length in enumerate(lengths) for tile in range(-(-length * group // rows))
    ]
    assert valid == [1] * len(expected) + [0] * (tiles - len(expected))
    sequence, tile, chunk = (numbers(workspace, at, sum(valid)) for at in (sequence_at, tile_at, chunk_at))
    assert sorted(zip(sequence, tile, strict=True)) == expected
    assert not any(chunk)
    in_order = [lengths[index] for index in sequence]
    assert in_order == sorted(in_order, reverse=True)
    assert numbers(workspace, rows_at, len(lengths) + 1) == offsets_of(lengths)
    assert numbers(workspace, size_at, 1)[0] >= max(lengths)
    assert numbers(workspace, total_at, 1) == [sum(lengths)]


@pytest.mark.parametrize("heads", [(4, 4, 64), (4, 2, 128)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_fa2_has_every_tile_once(lengths: list[int], heads: tuple[int, int, int], device: str) -> None:
    check_fa2([*lengths, 0], heads, device, padding=50)


@given(lengths=lengths_of)
@settings(max_examples=10, deadline=None)
def test_fa2_of_any_lengths(lengths: list[int]) -> None:
    check_fa2(lengths, (4, 2, 128), "cuda" if torch.cuda.is_available() else "cpu")


def test_short_sequences_get_low_tiles() -> None:
    def rows(num_tokens: int, num_seqs: int, heads: tuple[int, int, int] = (16, 16, 64)) -> int:
        return Fa2List.of(spec_of(heads), num_tokens, num_seqs).tile_rows

    assert rows(64 * 50, 64) == 64
    assert rows(64 * 65, 64) == 128
    assert rows(64 * 50, 64, (16, 8, 128)) == 128
    assert rows(512, 1, (4, 4, 256)) == 64
