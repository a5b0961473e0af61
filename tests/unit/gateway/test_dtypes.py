"""Number types, against other ways to make them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gateway.dtypes import Dtype, cast, read_dtype, widen
from gateway.errors import ApiError

VECTORS = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)


def test_bfloat16_is_torch_s() -> None:
    edges = np.array([[1.0, 1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, 3.3e38, 1e-40]], np.float32)
    for vectors in (VECTORS, edges):
        wanted = torch.from_numpy(vectors).to(torch.bfloat16)
        ours = cast(vectors, None, Dtype.BFLOAT16)
        np.testing.assert_array_equal(ours, wanted.view(torch.uint16).numpy())
        np.testing.assert_array_equal(widen(ours, Dtype.BFLOAT16), wanted.float().numpy())


def test_int8_keeps_cosines_and_uses_the_whole_range() -> None:
    for scale in (1e-6, 1.0, 1e6):
        scaled = cast(VECTORS * np.float32(scale), None, Dtype.INT8).astype(float)
        assert np.abs(scaled).max(axis=1).tolist() == [127] * 7
        cosines = (
            np.vecdot(scaled, VECTORS) / np.linalg.norm(scaled, axis=1) / np.linalg.norm(VECTORS, axis=1)
        )
        assert cosines.min() > 0.9999


def test_a_vector_of_zeros_stays_one() -> None:
    assert not cast(np.zeros((1, 8), np.float32), None, Dtype.INT8).any()


def test_the_model_s_own_int8_is_taken_and_cut() -> None:
    own = np.arange(-64, 64, dtype=np.int8).reshape(2, 64)
    given = cast(VECTORS[:2, :16], own, Dtype.INT8)
    np.testing.assert_array_equal(given, own[:, :16])
    assert given.flags.c_contiguous
    np.testing.assert_array_equal(cast(VECTORS[:2], own, Dtype.UINT8), own.astype(int) + 128)


def test_bits() -> None:
    vectors = np.array([[0.0, -1, 1, -1, -1, -1, -1, -1]], np.float32)
    assert cast(vectors, None, Dtype.UBINARY).tolist() == [[0b10100000]]
    assert cast(vectors, None, Dtype.UBINARY_LITTLE).tolist() == [[0b00000101]]
    assert cast(vectors, None, Dtype.BINARY).tolist() == [[0b10100000 - 128]]


@pytest.mark.parametrize(("name", "dimensions"), [("float64", 8), ("", 8), ("ubinary", 12), ("binary", 1)])
def test_what_cannot_be_made_is_refused(name: str, dimensions: int) -> None:
    with pytest.raises(ApiError) as caught:
        read_dtype(name, dimensions, "embed_dtype")
    assert caught.value.param == "embed_dtype"
