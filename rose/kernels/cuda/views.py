"""How the copy engine sees a weight [N, K] in bf16: address, sizes, strides in bytes and box.

Innermost first. A box is what one request brings: 64 columns of the rows that a warpgroup or
block multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.kernels.cuda.plan import CHUNK, TILE_ROWS

View = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def plain_view(address: int, n: int, k: int, *, rows: int = TILE_ROWS) -> View:
    """Rows as they are, boxes of `rows`."""
    return address, (k, n), (k * 2,), (CHUNK, rows)


def thirds_view(address: int, n: int, k: int, *, rows: int) -> View:
    """Queries, keys and values as [3][N / 3][K]: boxes of `rows` rows of each."""
    return address, (k, n // 3, 3), (k * 2, n // 3 * k * 2), (CHUNK, rows, 3)


def rows_view(address: int, shape: Sequence[int], tile: int) -> View:
    """Of a batch's rows, contiguous: boxes of `tile` of them; what lies beyond reads as zeros."""
    num_rows, width = shape
    return address, (width, num_rows), (width * 2,), (CHUNK, tile)


def gated_view(address: int, n: int, k: int) -> View:
    """A gate over an up projection as [N / 16][2][8][K]: 8 rows of the gate, the same 8 of up, and so on."""
    return address, (k, 8, 2, n // 16), (k * 2, n * k, k * 16), (CHUNK, 8, 2, TILE_ROWS // 16)


def half_head_view(address: int, n: int, k: int) -> View:
    """Heads of 128 rows as [N / 128][8][2][8][K]: 8 rows, the 8 that are 64 further, and so on.

    Half a box holds dimensions that the other half's are rotated with.
    """
    row = k * 2
    return address, (k, 8, 2, 8, n // 128), (row, 64 * row, 8 * row, 128 * row), (CHUNK, 8, 2, 4, 1)
