"""The number types that vectors are served in, made from what the engine gave."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.errors import ApiError, shown
from gateway.inputs import invalid
from rose.batch import Float32, Int8

Array = NDArray[Any]


class Dtype(enum.Enum):
    """What a vector's values are; the value is what requests and answers call it.

    FLOAT16: IEEE half. BFLOAT16: the upper half of float32, rounded to even, as uint16.
    INT8: the model's own quantiser where it has one, else each vector scaled so that its largest value is
        +-127, which keeps cosines. UINT8: INT8 + 128.
    UBINARY: a bit a value, 1 for >= 0, eight to a byte, the first in the highest bit, as in numpy.packbits.
    BINARY: UBINARY - 128 as int8, as Cohere and sentence-transformers have it.
    UBINARY_LITTLE: the first value in the lowest bit, as Perplexity has it.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"
    UBINARY_LITTLE = "ubinary_little"


_ALIASES = {"float": Dtype.FLOAT32, "bits": Dtype.UBINARY} | {dtype.value: dtype for dtype in Dtype}
_PACKED = {Dtype.BINARY, Dtype.UBINARY, Dtype.UBINARY_LITTLE}


def read_dtype(name: str, dimensions: int, param: str) -> Dtype:
    """The type that a request's field `param` names, for vectors of so many values.

    Raises:
        ApiError: INVALID_VALUE, for a name that we do not know or values that do not fill whole bytes.
    """
    dtype = _ALIASES.get(name)
    if dtype is None:
        raise invalid(f"{param} is {shown(name)}; this server knows {', '.join(_ALIASES)}", param)
    check_packing(dtype, name, dimensions, param)
    return dtype


def check_packing(dtype: Dtype, name: str, dimensions: int, param: str) -> None:
    """Refuse vectors whose bits do not fill whole bytes. name: what the request calls `dtype`.

    Raises:
        ApiError: INVALID_VALUE, for the request's field `param`.
    """
    if dtype in _PACKED and dimensions % 8:
        message = f"{name} packs 8 values to a byte; {dimensions} dimensions do not fill bytes"
        raise invalid(message, param)


def cast(vectors: Float32, int8: Int8 | None, dtype: Dtype) -> Array:
    """vectors f32[n, dim], finite, and the model's own int8 i8[n, D >= dim] or None -> [n, dim or dim / 8].

    Little-endian and contiguous; may be `vectors` itself.

    Raises:
        ApiError: INVALID_VALUE, when a value is beyond what float16 can hold.
    """
    if dtype is Dtype.FLOAT32:
        return vectors
    if dtype in (Dtype.INT8, Dtype.UINT8):
        signed = _scaled(vectors) if int8 is None else np.ascontiguousarray(int8[:, : vectors.shape[1]])
        return signed if dtype is Dtype.INT8 else (signed.view(np.uint8) ^ np.uint8(128))
    return _CASTS[dtype](vectors)


def widen(values: Array, dtype: Dtype) -> Array:
    """Values as numbers that JSON can hold: bfloat16 back to float32, the rest as they are."""
    if dtype is not Dtype.BFLOAT16:
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _float16(vectors: Float32) -> Array:
    with np.errstate(over="ignore"):
        halves = vectors.astype("<f2")
    if not np.isfinite(halves).all():
        raise _beyond_float16(float(np.abs(vectors).max()))
    return halves


def _bfloat16(vectors: Float32) -> Array:
    bits = vectors.view(np.uint32)
    # Half a unit in the last place that stays, and a little more where the bit above is odd: ties go to even.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2")


def _scaled(vectors: Float32) -> Int8:
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    largest[largest == 0] = 1
    scaled: Int8 = np.rint(vectors * (np.float32(127) / largest)).astype(np.int8)
    return scaled


def _beyond_float16(largest: float) -> ApiError:
    return invalid(f"float16 holds values up to 65504; this model gave {largest:.4g}", "embed_dtype")


_CASTS: dict[Dtype, Callable[[Float32], Array]] = {
    Dtype.FLOAT16: _float16,
    Dtype.BFLOAT16: _bfloat16,
    Dtype.UBINARY: lambda vectors: np.packbits(vectors >= 0, axis=1),
    Dtype.UBINARY_LITTLE: lambda vectors: np.packbits(vectors >= 0, axis=1, bitorder="little"),
    Dtype.BINARY: lambda vectors: (np.packbits(vectors >= 0, axis=1) ^ np.uint8(128)).view(np.int8),
}
