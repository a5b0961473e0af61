"""Matrix products with fused epilogues, by name: what is built and what a table of plans may ask for.

Free of torch, so that a build and its tests need none of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

# What follows the product x [M, K] @ w [N, K]ᵀ of row m and column n before it is stored; fp32 until then.
# plain:         nothing.
# bias:          + bias[n].
# swiglu:        silu(even columns) * odd ones, the weight's halves read as if interleaved: [M, N / 2].
# scaled-swiglu: the same of scale[m] times the product.
# gelu:          gelu(product + bias[n]), within 3e-5 of the exact form (see rose.aot.gelu_polynomial).
# residual:      residual += product; also stored: weight[n] * residual, and sums of residual² over the tile's
#                columns, so that RMSNorm's division can be left to the next product.
# rope:          scale[m] times the product, then RMSNorm of each query and key head and rotary positions of
#                adjacent columns (see rose.kernels.fused).
# unscaled-rope: the same of the product itself.
# rms-swiglu, rms-rope: as scaled-swiglu and rope; the scale is 1 / root mean square of the row of x, computed
#                in the kernel from the sums that residual stored.
# fp8:           scale[m] * scale[n] times the product of x and w in e4m3, stored as bf16.
# fp8-swiglu:    swiglu of that.
# fp8-swiglu-fp8: gate * up * sigmoid(scale[m] * gate), where gate and up are columns of scale[n] times the
#                product, stored as e4m3: scale[m]⁻² times swiglu, which rose.layers.fp8_linear makes fit.
Epilogue = Literal[
    "plain", "bias", "swiglu", "scaled-swiglu", "rms-swiglu", "gelu", "residual", "rope", "unscaled-rope",
    "rms-rope", "fp8", "fp8-swiglu", "fp8-swiglu-fp8",
]  # fmt: skip
EPILOGUES: tuple[Epilogue, ...] = get_args(Epilogue)

# Width of a head and what is added to its mean square: compiled into the rope epilogues. Qwen3's.
HEAD_DIM, HEAD_EPS = 128, 1e-6
# Added to a row's mean square: compiled into rms-swiglu and rms-rope. Qwen3's.
ROW_EPS = 1e-6
# Columns of K a step, unless the name says otherwise.
TILE_K = 64

_NAME = re.compile(r"gemm-([a-z0-9-]+)-(\d+)x(\d+)(?:x(\d+))?-(pingpong|cooperative)-(\d)x(\d)(-early)?")


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """One kernel: an epilogue and a tile of rows x columns (x K a step), for any M, N and K.

    pingpong: two warpgroups take turns, one's epilogue beside the other's product; else they share a tile.
    cluster_m, cluster_n: neighbouring tiles, by rows and columns, that share what they load.
    early: the next kernel may be brought up as soon as all of this one's blocks run, not as they end.
    own: of rose/kernels/cuda, which python -m rose.kernels.cuda.build builds; one that is launched early has
    the next so, too.
    """

    epilogue: Epilogue
    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int
    tile_k: int = TILE_K
    early: bool = False
    own: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether x and w are e4m3, not bf16."""
        return self.epilogue.startswith("fp8")

    @property
    def name(self) -> str:
        """Such as "gemm-swiglu-128x192-pingpong-2x1", or of an own one "cuda-residual-160x128-1x2"."""
        if self.own:
            return f"cuda-{self.epilogue}-{self.tile_m}x{self.tile_n}-{self.cluster_m}x{self.cluster_n}"
        schedule = "pingpong" if self.pingpong else "cooperative"
        tile = f"{self.tile_m}x{self.tile_n}" + (f"x{self.tile_k}" if self.tile_k != TILE_K else "")
        suffix = "-early" if self.early else ""
        return f"gemm-{self.epilogue}-{tile}-{schedule}-{self.cluster_m}x{self.cluster_n}{suffix}"

    @classmethod
    def parse(cls, name: str) -> ProductKernel:
        """The kernel of that name.

        Raises:
            ValueError: it is not such a name.
        """
        for own in OWN_PRODUCTS:
            if name == own.name:
                return own
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in EPILOGUES:
            raise ValueError(f"{name!r} names no product with an epilogue")
        tile_m, tile_n, cluster_m, cluster_n = (int(match[group]) for group in (2, 3, 6, 7))
        epilogue, tile_k = cast(Epilogue, match[1]), int(match[4] or TILE_K)
        pingpong, early = match[5] == "pingpong", match[8] is not None
        return cls(epilogue, tile_m, tile_n, pingpong, cluster_m, cluster_n, tile_k, early)


# Those of residual_product.cu and, with and without factors of rows, of rotary_product.cu.
RESIDUAL_PRODUCT = ProductKernel("residual", 160, 128, True, 1, 2, own=True)
ROTARY_PRODUCT = ProductKernel("rope", 128, 128, True, 1, 2, own=True)
UNSCALED_ROTARY_PRODUCT = ProductKernel("unscaled-rope", 128, 128, True, 1, 2, own=True)
OWN_PRODUCTS = (RESIDUAL_PRODUCT, ROTARY_PRODUCT, UNSCALED_ROTARY_PRODUCT)

# Each is the fastest on an H200 for some number of rows from 256 to 51200, of up to fifteen tried an epilogue
# (docs/benchmarks/log.md). Up to 1536 rows that is a matter of waves: tiles that all run at once on 132
# multiprocessors win, and the next smaller or larger ones lose.
DEFAULT_PRODUCTS = tuple(
    ProductKernel.parse(f"gemm-{name}")
    for name in (
        "plain-64x64x128-cooperative-2x1",
        "plain-128x64x128-cooperative-1x2",
        "bias-128x96-cooperative-2x1-early",
        "bias-128x128-pingpong-1x2",
        "bias-128x192-cooperative-2x1",
        "bias-192x128-pingpong-1x2",
        "swiglu-128x192-pingpong-2x1",
        "swiglu-192x128-pingpong-1x2",
        "scaled-swiglu-192x128-pingpong-1x2",
        "rms-swiglu-128x96x128-cooperative-2x1-early",
        "rms-swiglu-128x192-cooperative-2x1-early",
        "residual-64x64x128-cooperative-2x1-early",
        "rms-rope-64x128x128-cooperative-2x1-early",
        "rms-rope-128x128-cooperative-2x1-early",
        "gelu-128x128-cooperative-2x1",
        "gelu-128x128-pingpong-1x2",
        "gelu-128x192-cooperative-2x1-early",
        "gelu-128x192-pingpong-2x1",
        "gelu-192x128-pingpong-1x2",
        "gelu-256x128-cooperative-2x1",
        "fp8-128x128x128-pingpong-1x2",
        "fp8-128x192x128-pingpong-2x1",
        "fp8-swiglu-128x128x128-pingpong-1x2",
        "fp8-swiglu-128x192x128-pingpong-2x1",
        "fp8-swiglu-fp8-128x192x128-pingpong-2x1",
    )
)
