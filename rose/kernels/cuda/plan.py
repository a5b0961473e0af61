"""How the Hopper kernel of skinny_gemm.cu divides a product; integers only."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens a block may have: columns of the tensor cores' instruction. A batch takes the first that holds it.
TOKEN_TILES = (16, 32, 64, 128, 256)
CHUNK = 64  # columns of K that arrive together: 128 bytes of bf16, a swizzled row
TILE_ROWS = 64  # rows of the weight a warpgroup multiplies
MAX_CHUNKS = 16
SHARED_BYTES = 227 * 1024  # a block's most on sm_90
_HEADER_BYTES = 1024
_TILE_BYTES = TILE_ROWS * CHUNK * 2


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """One way to compute x [M, K] @ w [N, K]ᵀ with all of a block's weight in shared memory at once.

    splits: parts of K summed by other blocks; the output has as many partial sums.
    groups: warpgroups of a block, 1 to 3, each with 64 rows of the weight.
    cluster: blocks that fetch x for each other, 1 or 2.
    stages: chunks of x in flight; x goes through a ring where K has more.
    swiglu: the weight is a gate over an up projection, the product ends in SwiGLU; splits and groups are 1.
    """

    splits: int
    groups: int
    cluster: int
    stages: int
    swiglu: bool = False

    def chunks(self, k: int) -> int:
        """Chunks of a block's part of K."""
        return k // (self.splits * CHUNK)

    def grid(self, n: int) -> tuple[int, int]:
        """Blocks: tiles of the weight's rows, parts of K."""
        return n // (self.groups * TILE_ROWS), self.splits

    def threads(self) -> int:
        """Of a block: the warpgroups, and a warp that fetches."""
        return self.groups * 128 + 32

    def shared_bytes(self, m: int, k: int) -> int:
        """Of a block, for m tokens."""
        x, weight = token_tile(m) * CHUNK * 2, self.groups * _TILE_BYTES
        return _HEADER_BYTES + self.stages * x + self.chunks(k) * weight

    def kernel(self, m: int) -> str:
        """Name of the kernel in skinny_gemm.cu, for m tokens."""
        return f"skinny_{'gated' if self.swiglu else f'{self.groups}x64'}_{token_tile(m)}"

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether the kernel can multiply m rows by a weight [n, k] so; then fewer rows too."""
        if not 1 <= m <= TOKEN_TILES[-1] or self.groups not in (1, 2, 3) or self.cluster not in (1, 2):
            return False
        tokens, chunks = token_tile(m), self.chunks(k)
        whole = n % (self.groups * TILE_ROWS * self.cluster) == 0 and k == chunks * self.splits * CHUNK
        # A ring of one stage would wait for itself. Sums are transposed where a group's weight was.
        sized = min(chunks, 2) <= self.stages <= chunks <= MAX_CHUNKS and chunks * TILE_ROWS >= tokens
        simple = not self.swiglu or (self.splits == 1 and self.groups == 1)
        built = tokens < TOKEN_TILES[-1] or (self.groups == 1 and not self.swiglu)
        return whole and sized and simple and built and self.shared_bytes(m, k) <= SHARED_BYTES


def token_tile(m: int) -> int:
    """The smallest tile that holds m tokens.

    Raises:
        ValueError: none does.
    """
    for tile in TOKEN_TILES:
        if m <= tile:
            return tile
    raise ValueError(f"{m} tokens; a block takes at most {TOKEN_TILES[-1]}")
