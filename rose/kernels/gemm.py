"""Products with few rows in Triton, where splitting K (or fusing SwiGLU) beats cuBLAS; the rest is cuBLAS's.

At 16 to 128 tokens a product is as long as its launch and the latency of one pass over K: splitting K over
more multiprocessors took 704 to 486 µs a forward at 16 tokens on an H200 (pplx-embed-0.6b). The kernel that
follows adds the partial sums. Which tile serves which shape is a table written by rose.kernels.tune_gemm.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from rose.kernels import dispatch
from rose.kernels.activation import silu_mul

if TYPE_CHECKING:
    from torch import Tensor

Epilogue = Literal["none", "swiglu"]
TABLE_PATH = Path(__file__).with_name("gemm_h200.json")
# The table was measured on Hopper; elsewhere cuBLAS is right for every shape.
TABLE_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """One way to compute x [M, K] @ w [N, K]ᵀ in Triton.

    splits: parts of K summed by other programs; the output has as many partial sums.
    block_m, block_n, block_k: the tile. stages: loads in flight. warps: of 32 threads.
    """

    splits: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int

    def fits(self, n: int, k: int) -> bool:
        """Whether N and K are whole numbers of tiles; kernels mask rows only."""
        return n % self.block_n == 0 and k % (self.splits * self.block_k) == 0


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """A line of the table: [M, K] x [N, K] products of M up to max_m take `plan`, or cuBLAS if it is None."""

    n: int
    k: int
    max_m: int
    epilogue: Epilogue
    plan: GemmPlan | None


def uses_table(weight: Tensor) -> bool:
    """Whether products with `weight` may follow the table: 16-bit, on a GPU of the kind it was made on."""
    if not dispatch.uses_triton(weight) or weight.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(weight.device) == TABLE_CAPABILITY


def partial_elements(n: int, k: int) -> int:
    """Elements that the largest split-K product with a weight [n, k] writes: splits * M * n."""
    return max((c.plan.splits * c.max_m * n for c in plans(n, k) if c.plan is not None), default=0)


def row_counts(shapes: Collection[tuple[int, int]]) -> list[int]:
    """Numbers of rows that between them use every plan for weights of shapes (n, k), and then cuBLAS."""
    limits = {choice.max_m for (n, k, _), row in table().items() if (n, k) in shapes for choice in row}
    return [*sorted(limits), max(limits, default=0) + 1]


def gemm_plan(m: int, n: int, k: int, epilogue: Epilogue = "none") -> GemmPlan | None:
    """The plan for M = m, or None: cuBLAS (then silu_mul, for "swiglu", whose n counts gate and up)."""
    for choice in table().get((n, k, epilogue), ()):
        if m <= choice.max_m:
            return choice.plan
    return None


def plans(n: int, k: int, epilogue: Epilogue = "none") -> Sequence[GemmChoice]:
    """All choices for one weight, by rising max_m: what a model must compile and find room for."""
    return table().get((n, k, epilogue), ())


@functools.cache
def table() -> Mapping[tuple[int, int, str], Sequence[GemmChoice]]:
    """The choices by (n, k, epilogue), read once from `TABLE_PATH`."""
    return read_table(TABLE_PATH)


def read_table(path: Path) -> dict[tuple[int, int, str], list[GemmChoice]]:
    """Read what tune_gemm wrote; lists are by rising max_m.

    Raises:
        ValueError: a plan does not fit its shape.
    """
    choices: dict[tuple[int, int, str], list[GemmChoice]] = {}
    for row in json.loads(path.read_text("utf-8"))["choices"]:
        plan = GemmPlan(*row["plan"]) if row["plan"] else None
        choice = GemmChoice(row["n"], row["k"], row["max_m"], row["epilogue"], plan)
        if plan is not None and not plan.fits(choice.n, choice.k):
            raise ValueError(f"{path}: {plan} does not fit n={choice.n}, k={choice.k}")
        choices.setdefault((choice.n, choice.k, choice.epilogue), []).append(choice)
    for rows in choices.values():
        rows.sort(key=lambda choice: choice.max_m)
    return choices


def split_k_gemm(x: Tensor, weight: Tensor, plan: GemmPlan, out: Tensor) -> None:
    """out [splits, M, N] = partial sums of x [M, K] @ weight [N, K]ᵀ over equal parts of K; all contiguous.

    The sum over the first axis is the product. Accumulated in fp32, stored in `out`'s dtype.
    """
    if dispatch.uses_triton(x):
        from rose.kernels.jit import gemm as jit

        jit.split_k_gemm(x, weight, plan, out)
        return
    for split, (part, rows) in enumerate(
        zip(x.float().chunk(plan.splits, 1), weight.float().chunk(plan.splits, 1), strict=True)
    ):
        out[split].copy_(part @ rows.T)


def swiglu_gemm(x: Tensor, weight: Tensor, plan: GemmPlan, out: Tensor) -> None:
    """out [M, I] = silu(x @ gateᵀ) * (x @ upᵀ), weight [2I, K] = gate over up; plan.splits is 1."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import gemm as jit

        jit.swiglu_gemm(x, weight, plan, out)
    else:
        silu_mul(torch.mm(x.float(), weight.float().T), out)
