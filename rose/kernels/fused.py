"""Products of many rows with fused epilogues, built ahead of time (rose.aot.products).

At 51200 tokens the kernels between a forward's products took 23 of 99 ms on an H200 (pplx-embed-0.6b), most
of it to read back what a product had just written. Which kernel serves which weight from how many rows on is
a table written by rose.layers.tune_fused and tune_layers. Where it names none, or the kernel is not built,
the product is cuBLAS's and the next kernel does the rest.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rose.aot.folders import default_folders
from rose.aot.library import Kernel, KernelLibrary, KernelQuery, load_module
from rose.aot.products import HEAD_DIM, Epilogue, ProductKernel
from rose.kernels.cuda.cubin import RESIDUAL_PRODUCT, ROTARY_PRODUCT
from rose.kernels.cuda.library import cuda_library
from rose.kernels.cuda.residual_product import ResidualProduct
from rose.kernels.cuda.rotary_product import ANGLE_ORDER, RotaryProduct
from rose.kernels.tables import in_use, read_choices

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.fp8 import Fp8Rows
    from rose.kernels.gemm import Ending, WeightKey

log = logging.getLogger(__name__)

TABLE_PATH = Path(__file__).with_name("fused_h200.json")
# Tiles of one column of the output that are computed one after another before the next column's: QuACK's own.
_SWIZZLE = 8

# Pairs of a head one after the other, as QuACK's kernels take their angles.
ADJACENT = tuple(range(HEAD_DIM // 2))

# (epilogue, n, k) of a product with a weight [n, k].
FusedKey = tuple[Epilogue, int, int]
# What follows the product in models' own keys of their weights.
_ENDINGS: Mapping[Epilogue, Ending] = {
    "plain": "sum", "residual": "sum", "rope": "sum", "unscaled-rope": "sum", "rms-rope": "sum",
    "bias": "bias", "gelu": "gelu", "swiglu": "swiglu", "scaled-swiglu": "swiglu", "rms-swiglu": "swiglu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """Products of at least min_m rows take `kernel`, or cuBLAS where it is None.

    early: the whole layer was fastest with its kernels launched early (see `gains_early`).
    """

    min_m: int
    kernel: ProductKernel | None
    early: bool = False


@dataclass(frozen=True, slots=True)
class RopeColumns:
    """What the rope epilogue needs to know of each column: weight, keep: bf16[N].

    weight: of the norm of the head that the column belongs to, 0 for value heads. keep: 1 for those, else 0.
    rotated_heads: those before them.
    """

    weight: Tensor
    keep: Tensor
    rotated_heads: int


class FusedGemm:
    """One loaded kernel: x [M, K] @ weight [N, K]ᵀ and its epilogue, of which the caller takes the right one.

    All tensors are bf16, their rows contiguous, except where said. Nothing is allocated and rows past M are
    not written; may be captured. call: the kernel's nine arguments. processors: of the GPU.
    """

    def __init__(self, kernel: ProductKernel, call: Kernel, processors: int) -> None:
        self.kernel = kernel
        self._call = call
        clusters = processors // (kernel.cluster_m * kernel.cluster_n)
        # Clusters at a time, order (chosen by shape), swizzle; the rest is for other schedulers.
        self._schedule = (clusters, None, _SWIZZLE, None, None, None)

    def __repr__(self) -> str:
        return f"FusedGemm({self.kernel.name})"

    def plain(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [M, N] = x weightᵀ. Unlike cuBLAS's, it is brought up while the kernel before still runs."""
        self._run(x, weight, out, None)

    def bias(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """out [M, N] = x weightᵀ + bias [N]."""
        self._run(x, weight, out, None, bias)

    def swiglu(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [M, N / 2] = silu(x gateᵀ) * (x upᵀ); weight: gate over up.

        Raises:
            ValueError: out has another width, which the kernel itself does not check.
        """
        self._run(x, weight, None, None, _half(weight, out))

    def scaled_swiglu(self, x: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> None:
        """As swiglu of x, each row times its scale: f32[M], or for rms-swiglu what `residual` returned."""
        self._run(x, weight, None, None, scale, _half(weight, out))

    def fp8(self, x: Fp8Rows, weight: Tensor, columns: Tensor, out: Tensor) -> None:
        """out [M, N] = x weightᵀ * columns [N]. weight: e4m3. columns: f32, the scales of its rows."""
        self._run(x.values, weight, out, None, x.scale.view(-1), columns)

    def fp8_swiglu(self, x: Fp8Rows, weight: Tensor, columns: Tensor, out: Tensor) -> None:
        """As swiglu of that product. columns: f32[N], the scales of gate's and up's rows in turns."""
        self._run(x.values, weight, None, None, x.scale.view(-1), columns, _half(weight, out))

    def fp8_swiglu_fp8(self, x: Fp8Rows, weight: Tensor, columns: Tensor, out: Tensor) -> None:
        """out e4m3[M, N / 2] = as fp8_swiglu, over the square of the row's scale."""
        self._run(x.values, weight, None, None, x.scale.view(-1), columns, _half(weight, out))

    def gelu(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """out [M, N] = gelu(x weightᵀ + bias [N]), within 3e-5 of the exact form."""
        self._run(x, weight, out, None, bias)

    def residual(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        columns: Tensor,
        out: Tensor,
        sums: Tensor,
    ) -> Tensor:
        """residual [M, N] += x weightᵀ; out [M, N] = residual * columns [N].

        sums: flat f32, room for M of `sum_parts`. Returns f32[M, parts] in it, which added up are the sums of
        each row's squares of the unrounded residual: see rose.kernels.row_scale.
        """
        m, parts = len(x), self.sum_parts(len(weight))
        partial = sums[: m * parts].view(m, parts)
        self._run(x, weight, out, residual, columns, residual, partial)
        return partial

    def sum_parts(self, n: int) -> int:
        """Partial sums a row that `residual` makes for a weight of n rows."""
        return -(-n // self.kernel.tile_n)

    def rope(
        self,
        x: Tensor,
        weight: Tensor,
        columns: RopeColumns,
        scale: Tensor | None,
        angles: Tensor,
        out: Tensor,
    ) -> None:
        """out [M, N] = scale[m] * x weightᵀ; of it, query and key heads normed and rotated.

        A rotated pair are two adjacent columns. angles: fp16[M, 128], cos and sin of each pair in turns,
        pairs as `angle_order` has them. scale: f32[M], for rms-rope what `residual` returned, for
        unscaled-rope None.
        """
        scales = () if scale is None else (scale,)
        # The place of the heads' width, compiled in, stays empty in QuACK's kernels.
        heads = columns.rotated_heads if self.kernel.own else None
        self._run(x, weight, out, None, angles, heads, columns.weight, columns.keep, *scales)

    @property
    def angle_order(self) -> tuple[int, ...]:
        """Which pair of a head's 64 each angle of a token is of, that `rope` takes."""
        return ANGLE_ORDER if self.kernel.own else ADJACENT

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor | None,
        residual: Tensor | None,
        *operands: Tensor | int | None,
    ) -> None:
        # After the operands: flags and workspace of a split K, which is not built in.
        epilogue = (*operands, None, None)
        self._call(x, weight, out, residual, epilogue, self._schedule, None, None, None)


def _half(weight: Tensor, out: Tensor) -> Tensor:
    if 2 * out.shape[1] != len(weight):
        raise ValueError(f"SwiGLU of a weight of {len(weight)} rows into {out.shape[1]} columns")
    return out


FusedLookup = Callable[[Epilogue, int, int, int], FusedGemm | None]


def fused_gemm(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
    """The kernel for x [m, k] and a weight [n, k]; None: not fused."""
    chosen = choice(table().get((epilogue, n, k), ()), m)
    return None if chosen is None or chosen.kernel is None else load(chosen.kernel)


def choice(choices: Sequence[FusedChoice], m: int) -> FusedChoice | None:
    """The last of one weight's choices with min_m <= m; None: there is none."""
    fitting = [one for one in choices if one.min_m <= m]
    return fitting[-1] if fitting else None


def gains_early(m: int, keys: Collection[WeightKey]) -> bool:
    """Whether layers of m rows gain from early launches, by what the table says of one of their weights.

    A kernel that is not built says nothing: with cuBLAS in its place nothing was measured.
    """
    for (epilogue, n, k), choices in table().items():
        chosen = choice(choices, m)
        if chosen is None or not chosen.early or (n, k, _ENDINGS.get(epilogue)) not in keys:
            continue
        if chosen.kernel is not None and load(chosen.kernel) is not None:
            return True
    return False


def fused_row_counts() -> set[int]:
    """Numbers of rows that between them use every kernel of the table."""
    return {one.min_m for choices in table().values() for one in choices}


@functools.cache
def load(kernel: ProductKernel) -> FusedGemm | None:
    """The kernel, from the first folder that has it for this GPU; None, with a log line, if none has."""
    if not torch.cuda.is_available():
        return None
    if kernel.own:
        return _load_own(kernel)
    library = KernelLibrary(default_folders(), torch.cuda.get_device_capability())
    path = library.find(KernelQuery(kernel.name))
    if path is None:
        log.info("no kernel built for %s (python -m rose.aot builds it); cuBLAS serves", kernel.name)
        return None
    try:
        call: Kernel = load_module(path).func
    except Exception as error:  # whatever a loader raises for a missing package or a damaged file
        log.warning("cannot use %s: %s: %s", path, type(error).__name__, error)
        return None
    return FusedGemm(kernel, call, torch.cuda.get_device_properties().multi_processor_count)


def _load_own(kernel: ProductKernel) -> FusedGemm | None:
    residual = kernel.epilogue == "residual"
    library = cuda_library(RESIDUAL_PRODUCT if residual else ROTARY_PRODUCT)
    if library is None:
        return None
    processors = torch.cuda.get_device_properties().multi_processor_count
    call: Kernel = (ResidualProduct if residual else RotaryProduct)(library, processors)
    return FusedGemm(kernel, call, processors)


@functools.cache
def table() -> Mapping[FusedKey, Sequence[FusedChoice]]:
    """The choices for each weight by rising min_m, read once: the user's own or those that ship."""
    return in_use(TABLE_PATH, read_table)


def read_table(path: Path) -> dict[FusedKey, list[FusedChoice]]:
    """Read what tune_fused or tune_layers wrote.

    Raises:
        ValueError: a kernel's name is none, or is of another epilogue than its line.
    """
    found: dict[FusedKey, list[FusedChoice]] = {}
    for row in read_choices(path):
        kernel = ProductKernel.parse(row["kernel"]) if row["kernel"] else None
        if kernel is not None and kernel.epilogue != row["epilogue"]:
            raise ValueError(f"{path}: {kernel.name} for a product with {row['epilogue']}")
        key = (row["epilogue"], row["n"], row["k"])
        found.setdefault(key, []).append(FusedChoice(row["min_m"], kernel, row.get("early", False)))
    for choices in found.values():
        choices.sort(key=lambda one: one.min_m)
    return found
