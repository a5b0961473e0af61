"""Products with few rows by kernels of our own, which split K or fuse what follows; the rest is cuBLAS's.

At 16 to 128 tokens a product is as long as its launch and the latency of one pass over K: splitting K over
more multiprocessors took 704 to 486 µs a forward at 16 tokens on an H200 (pplx-embed-0.6b). The kernel that
follows adds the partial sums. There are Triton kernels, and one in CUDA C++ that is faster where it has been
built: it fetches its weight while the kernel before still runs. Which plan serves which shape is a table
written by rose.kernels.tune_gemm.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rose.kernels import dispatch
from rose.kernels.activation import add_bias, bias_gelu, silu_mul
from rose.kernels.cuda.plan import SkinnyPlan
from rose.kernels.tables import in_use, read_choices

if TYPE_CHECKING:
    from torch import Tensor

TABLE_PATH = Path(__file__).with_name("gemm_h200.json")
# The table was measured on Hopper; elsewhere cuBLAS is right for every shape.
TABLE_CAPABILITY = (9, 0)
# No plans beyond: cuBLAS fills the GPU there.
MAX_ROWS = 1024

# What follows a product with a weight: "sum", a kernel that adds partial sums anyway; "bias", its addition
# and nothing else; "gelu", bias and GELU; "swiglu", SwiGLU of a weight that is a gate over an up projection.
Ending = Literal["sum", "bias", "gelu", "swiglu"]

# (n, k, ending) of a weight [n, k]: products of one shape may have different best plans.
WeightKey = tuple[int, int, Ending]


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """One way to compute x [M, K] @ w [N, K]ᵀ in Triton.

    splits: parts of K summed by other programs; the output has as many partial sums.
    block_m, block_n, block_k: the tile. stages: loads in flight. warps: of 32 threads.
    fused: the ending that the kernel includes; then splits is 1, and for "swiglu" block_n counts columns of
    the result. "sum": none, it is left to the kernel that follows.
    """

    splits: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    fused: Ending = "sum"

    @property
    def swiglu(self) -> bool:
        """Whether the kernel includes SwiGLU."""
        return self.fused == "swiglu"

    @property
    def shared_bytes(self) -> int:
        """Of a program in bf16, for the loads in flight."""
        columns = self.block_n * (2 if self.swiglu else 1)
        return self.stages * (self.block_m + columns) * self.block_k * 2

    def fits(self, n: int, k: int) -> bool:
        """Whether N and K are whole numbers of tiles; kernels mask rows only."""
        columns = n // 2 if self.swiglu else n
        whole = columns % self.block_n == 0 and k % (self.splits * self.block_k) == 0
        return whole and (self.fused == "sum" or self.splits == 1)


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """Products of up to max_m rows take `plan`, or cuBLAS (then the ending's own kernel) where it is None."""

    max_m: int
    plan: GemmPlan | SkinnyPlan | None


def uses_table(weight: Tensor) -> bool:
    """Whether products with `weight` may follow the table: bf16, on a GPU of the kind it was made on."""
    if not dispatch.uses_triton(weight) or weight.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device) == TABLE_CAPABILITY


def gemm_plan(m: int, n: int, k: int, ending: Ending = "sum") -> GemmPlan | SkinnyPlan | None:
    """The plan for x [m, k] and a weight [n, k], or None: cuBLAS."""
    for choice in table().get((n, k, ending), ()):
        if m <= choice.max_m:
            return choice.plan
    return None


def partial_elements(key: WeightKey) -> int:
    """Elements that the largest split-K product with this weight writes: splits * M * n."""
    plans = ((choice.plan, choice.max_m) for choice in table().get(key, ()))
    sizes = (plan.splits * max_m for plan, max_m in plans if plan is not None and plan.splits > 1)
    return max(sizes, default=0) * key[0]


def plan_rows(keys: Collection[WeightKey]) -> list[int]:
    """Numbers of rows that between them use every plan for these weights."""
    return sorted({choice.max_m for key in keys for choice in table().get(key, ())})


def fetches_early(m: int, keys: Collection[WeightKey]) -> bool:
    """Whether a product of m rows with one of these weights fetches it while the kernel before still runs."""
    return any(isinstance(gemm_plan(m, *key), SkinnyPlan) for key in keys)


@functools.cache
def table() -> Mapping[WeightKey, Sequence[GemmChoice]]:
    """The choices for each weight by rising max_m, read once."""
    from rose.kernels.cuda.skinny_gemm import skinny_kernels

    return table_in_use(skinny=skinny_kernels() is not None)


def table_in_use(skinny: bool) -> Mapping[WeightKey, Sequence[GemmChoice]]:
    """The user's own table, or the shipped one; skinny: as of `read_table`."""
    return in_use(TABLE_PATH, functools.partial(read_table, skinny=skinny))


def read_table(path: Path, skinny: bool = False) -> dict[WeightKey, list[GemmChoice]]:
    """Read what tune_gemm wrote: of each line the plan without skinny_gemm, or with it if `skinny`.

    Raises:
        ValueError: a plan does not fit its shape, or is for more than MAX_ROWS rows.
    """
    table: dict[WeightKey, list[GemmChoice]] = {}
    for row in read_choices(path):
        n, k = row["n"], row["k"]
        plan = _read_plan(row, skinny)
        if isinstance(plan, SkinnyPlan):
            fits = plan.fits(row["max_m"], n, k)
        else:
            fits = plan is None or plan.fits(n, k)
        if not fits:
            raise ValueError(f"{path}: {plan} does not fit n={n}, k={k}")
        if row["max_m"] > MAX_ROWS:
            raise ValueError(f"{path}: max_m is {row['max_m']}; plans end at {MAX_ROWS} rows")
        table.setdefault((n, k, row["ending"]), []).append(GemmChoice(row["max_m"], plan))
    for choices in table.values():
        choices.sort(key=lambda choice: choice.max_m)
    return table


def _read_plan(row: Mapping[str, Any], skinny: bool) -> GemmPlan | SkinnyPlan | None:
    if skinny and row.get("skinny"):
        return SkinnyPlan(**row["skinny"])
    return GemmPlan(**row["plan"]) if row["plan"] else None


def split_k_gemm(x: Tensor, weight: Tensor, plan: GemmPlan | SkinnyPlan, out: Tensor) -> None:
    """out [splits, M, N] = partial sums of x [M, K] @ weight [N, K]ᵀ over equal parts of K; all contiguous.

    The sum over the first axis is the product. Accumulated in fp32, stored in `out`'s dtype.
    """
    if isinstance(plan, SkinnyPlan):
        _skinny_gemm(x, weight, plan, out)
        return
    if dispatch.uses_triton(x):
        from rose.kernels.jit import gemm as jit

        jit.split_k_gemm(x, weight, plan, out)
        return
    for split, (part, rows) in enumerate(
        zip(x.float().chunk(plan.splits, 1), weight.float().chunk(plan.splits, 1), strict=True)
    ):
        out[split].copy_(part @ rows.T)


def bias_gemm(x: Tensor, weight: Tensor, bias: Tensor, plan: GemmPlan, out: Tensor) -> None:
    """out [M, N] = x [M, K] @ weight [N, K]ᵀ + bias [N], through GELU if plan.fused says so; one kernel."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import gemm as jit

        jit.bias_gemm(x, weight, bias, plan, out)
    else:
        finish = bias_gelu if plan.fused == "gelu" else add_bias
        finish(torch.mm(x.float(), weight.float().T), bias, out)


def swiglu_gemm(x: Tensor, weight: Tensor, plan: GemmPlan | SkinnyPlan, out: Tensor) -> None:
    """out [M, I] = silu(x @ gateᵀ) * (x @ upᵀ), weight [2I, K] = gate over up; see GemmPlan.swiglu."""
    if isinstance(plan, SkinnyPlan):
        _skinny_gemm(x, weight, plan, out)
    elif dispatch.uses_triton(x):
        from rose.kernels.jit import gemm as jit

        jit.swiglu_gemm(x, weight, plan, out)
    else:
        silu_mul(torch.mm(x.float(), weight.float().T), out)


def _skinny_gemm(x: Tensor, weight: Tensor, plan: SkinnyPlan, out: Tensor) -> None:
    from rose.kernels.cuda.skinny_gemm import skinny_gemm

    skinny_gemm(x, weight, plan, out)
