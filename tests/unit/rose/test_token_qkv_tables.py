"""Which first layers get tables of queries, keys and values: where memory suffices and nothing is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rose.kernels.embedding import BertTables
from rose.kernels.norm import LayerNorm, RmsNorm
from rose.kernels.rope import QkRope, rope_table
from rose.layers import token_qkv
from rose.layers.token_qkv import bert_qkv_tables, rotary_qkv_table

ROWS, HIDDEN, HEAD_DIM = 10, 8, 4
WORDS = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16)
WEIGHT = torch.ones(3 * HIDDEN, HIDDEN, dtype=torch.bfloat16)
NBYTES = ROWS * 3 * HIDDEN * 2


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Has tensors be on a GPU with so many bytes free, of so many."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def are(free: int, total: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    return are


@pytest.mark.parametrize(
    ("free", "total", "fits"),
    [
        (4 * NBYTES, 40 * NBYTES, True),
        (4 * NBYTES - 1, 40 * NBYTES, False),
        (40 * NBYTES, 40 * NBYTES - 40, False),
    ],
)
def test_a_table_takes_a_small_part_of_the_memory_and_leaves_some_free(
    memory: Callable[[int, int], None], free: int, total: int, fits: bool
) -> None:
    memory(free, total)
    assert token_qkv._has_room(WORDS, 3 * HIDDEN) == fits
    assert (rotary_qkv_table(WORDS, norm(), WEIGHT, rope()) is not None) == fits
    assert (bert_qkv_tables(bert(), WEIGHT, WEIGHT[:, 0]) is not None) == fits


def test_a_cpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    assert not token_qkv._has_room(WORDS, 1)
    assert rotary_qkv_table(WORDS, norm(), WEIGHT, rope()) is None
    assert bert_qkv_tables(bert(), WEIGHT, WEIGHT[:, 0]) is None


def test_heads_with_a_bias_and_weights_that_are_not_kept_have_no_table(
    memory: Callable[[int, int], None],
) -> None:
    memory(1 << 40, 1 << 40)
    assert rotary_qkv_table(WORDS, norm(), None, rope()) is None
    assert rotary_qkv_table(WORDS, norm(), WEIGHT, replace(rope(), bias=torch.zeros(3 * HIDDEN))) is None
    assert bert_qkv_tables(bert(), None, WEIGHT[:, 0]) is None


@pytest.mark.parametrize("missing", ["position", "token_type"])
def test_a_bert_without_positions_or_token_types_has_no_tables(
    memory: Callable[[int, int], None], missing: str
) -> None:
    memory(1 << 40, 1 << 40)
    without = replace(bert(), token_type=None) if missing == "token_type" else replace(bert(), position=None)
    assert bert_qkv_tables(without, WEIGHT, WEIGHT[:, 0]) is None


def norm() -> RmsNorm:
    return RmsNorm(WORDS[0], 1e-6)


def rope() -> QkRope:
    return QkRope(2, 2, HEAD_DIM, 1e-6, None, rope_table(HEAD_DIM, 1e4, 16, "cpu"))


def bert() -> BertTables:
    return BertTables(WORDS, WORDS[:5], WORDS[:2], LayerNorm(WORDS[0], WORDS[0], 1e-5), 0)
