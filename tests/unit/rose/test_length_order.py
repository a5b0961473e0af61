"""Sorting by length moves whole sequences and can be undone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.attention.base import AttentionSpec
from rose.attention.sdpa import SdpaAttention
from rose.batch import RaggedBatch
from rose.device_batch import DeviceBatch
from rose.layers.length_order import sorted_by_length

SPEC = AttentionSpec(1, 1, 8, 1.0, False, torch.float32, torch.device("cpu"))


def _batch(lengths: list[int]) -> DeviceBatch:
    """Every token's id tells its sequence and place; types are the ids' negatives."""
    sequences = [np.arange(length, dtype=np.int32) + 1000 * row for row, length in enumerate(lengths)]
    packed = RaggedBatch.pack(sequences, [-ids for ids in sequences])
    assert packed.token_type_ids is not None
    return DeviceBatch(
        input_ids=torch.from_numpy(packed.input_ids),
        cu_seqlens=torch.from_numpy(packed.cu_seqlens),
        token_type_ids=torch.from_numpy(packed.token_type_ids),
        host_cu_seqlens=packed.cu_seqlens,
        max_seqlen=max(lengths),
        attention=SdpaAttention(SPEC),
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_sequences_stay_whole(lengths: list[int]) -> None:
    batch = _batch(lengths)
    ordered, places = sorted_by_length(batch)
    new_lengths = np.diff(ordered.host_cu_seqlens).tolist()
    assert new_lengths == sorted(lengths)
    if places is None:
        assert ordered is batch and lengths == sorted(lengths)
        return
    rows = places.rows
    assert rows is not None
    assert torch.equal(batch.input_ids[places.tokens], ordered.input_ids)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    assert torch.equal(ordered.cu_seqlens, torch.from_numpy(ordered.host_cu_seqlens))
    for place, row in enumerate(rows.tolist()):
        begin, end = ordered.host_cu_seqlens[place : place + 2]
        expected = torch.arange(lengths[row], dtype=torch.int32) + 1000 * row
        assert torch.equal(ordered.input_ids[begin:end], expected)
        assert ordered.token_type_ids is not None
        assert torch.equal(ordered.token_type_ids[begin:end], -expected)
