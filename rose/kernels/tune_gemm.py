"""Time cuBLAS against products by kernels of our own and write the table that `rose.kernels.gemm` reads.

    python -m rose.kernels.tune_gemm [--out FILE.json] [--skinny-only]

Each candidate is timed with the kernel that consumes it (which adds the partial sums), over 28 different
weights in one CUDA graph, as in a model: one weight would stay in the L2 cache and look faster than it is.
Takes about a minute on an H200; stops at --budget-s and writes the best so far. Plans of skinny_gemm are
measured if it is built (python -m rose.kernels.cuda.build) and noted beside the best plan without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, TypeVar

import torch
from torch import Tensor

from rose.kernels.activation import add_bias, bias_gelu, silu_mul
from rose.kernels.cuda.plan import CHUNK, SHARED_BYTES, TOKEN_TILES, SkinnyPlan, token_tile
from rose.kernels.cuda.skinny_gemm import skinny_kernels
from rose.kernels.early import early_for, launching
from rose.kernels.gemm import (
    TABLE_PATH,
    Ending,
    GemmChoice,
    GemmPlan,
    WeightKey,
    bias_gemm,
    read_table,
    split_k_gemm,
    swiglu_gemm,
)
from rose.kernels.norm import LayerNorm, RmsNorm, add_layer_norm, add_rms_norm
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.kernels.tables import in_use, read_choices, say, tuner_parser, write_choices
from rose.kernels.timing import graph_us

Consumer = Literal["rope", "rms_norm", "layer_norm", "silu", "gelu", "bias"]
Plan = TypeVar("Plan", GemmPlan, SkinnyPlan)

NUM_WEIGHTS = 28
ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
# cuBLAS keeps a shape unless another way is at least this much faster: smaller gains are within the noise.
MIN_GAIN = 0.03
# Programs of a product worth trying: from three quarters of an H200's 132 processors to three waves of them.
PROGRAMS = range(96, 397)
# Of skinny_gemm a processor holds one block, or two small ones.
SKINNY_BLOCKS = range(48, 133)


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k] of a model and what follows its product."""

    name: str
    n: int
    k: int
    consumer: Consumer

    @property
    def ending(self) -> Ending:
        """As in the table."""
        endings: dict[Consumer, Ending] = {"silu": "swiglu", "gelu": "gelu", "bias": "bias"}
        return endings.get(self.consumer, "sum")

    @property
    def key(self) -> WeightKey:
        """As in the table."""
        return self.n, self.k, self.ending


SHAPES = (
    Shape("pplx down", 1024, 3072, "rms_norm"),
    Shape("pplx o", 1024, 2048, "rms_norm"),
    Shape("pplx gate-up", 6144, 1024, "silu"),
    Shape("pplx qkv", 4096, 1024, "rope"),
    Shape("bge-m3 down", 1024, 4096, "layer_norm"),
    Shape("bge-m3 o", 1024, 1024, "layer_norm"),
    Shape("bge-m3 up", 4096, 1024, "gelu"),
    Shape("bge-m3 qkv", 3072, 1024, "bias"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """The tensors of one shape at M rows; `consume` takes the product [M, N] or partial sums [K, M, N].

    bias: [N]. ended: what products write that end by themselves: [M, N], or [M, N / 2] for SwiGLU. add: of a
    weight, where cuBLAS adds its product to the residual stream, which is then normed: both.
    """

    shape: Shape
    x: Tensor
    weights: Sequence[Tensor]
    consume: Callable[[Tensor], None]
    bias: Tensor
    ended: Tensor
    add: Callable[[Tensor], None] | None = None

    def enqueue(self, plan: GemmPlan | SkinnyPlan | None) -> None:
        """All weights' products, one after another, each with its consumer, launched as in a forward.

        plan: None for cuBLAS, whose own kernel adds a bias that nothing follows.
        """
        m, n = len(self.x), self.shape.n
        splits = 1 if plan is None else plan.splits
        out = torch.empty(splits, m, n, dtype=self.x.dtype, device=self.x.device)
        with launching(early_for(m, isinstance(plan, SkinnyPlan), self.x.device)):
            for weight in self.weights:
                self._product(weight, plan, out)

    def _product(self, weight: Tensor, plan: GemmPlan | SkinnyPlan | None, out: Tensor) -> None:
        if plan is None and self.shape.consumer == "bias":
            torch.addmm(self.bias, self.x, weight.T, out=self.ended)
        elif plan is None and self.add is not None:
            self.add(weight)
        elif plan is None:
            torch.mm(self.x, weight.T, out=out[0])
            self.consume(out[0])
        elif plan.swiglu:
            swiglu_gemm(self.x, weight, plan, self.ended)
        elif isinstance(plan, GemmPlan) and plan.fused != "sum":
            bias_gemm(self.x, weight, self.bias, plan, self.ended)
        else:
            split_k_gemm(self.x, weight, plan, out)
            self.consume(out if plan.splits > 1 else out[0])


def problem(shape: Shape, m: int, weights: Sequence[Tensor]) -> Problem:
    """Random tensors of `shape` at m rows."""
    x = _random(m, shape.k)
    residual, out = _random(m, shape.n), _random(m, shape.n)
    ended = _random(m, shape.n // 2 if shape.consumer == "silu" else shape.n)
    weight, bias = _random(shape.n), _random(shape.n)
    norms: dict[Consumer, Callable[[Tensor | None], None]] = {
        "rms_norm": lambda y: add_rms_norm(y, residual, RmsNorm(weight, 1e-6), out),
        "layer_norm": lambda y: add_layer_norm(y, residual, bias, LayerNorm(weight, bias, 1e-5), out),
    }
    consume: dict[Consumer, Callable[[Tensor], None]] = {
        **norms,
        "silu": lambda y: silu_mul(y, ended),
        "gelu": lambda y: bias_gelu(y, bias, ended),
        "bias": lambda y: add_bias(y, bias, ended),
        "rope": _rope(m, out),
    }

    def add(factor: Tensor) -> None:
        residual.addmm_(x, factor.T)
        norms[shape.consumer](None)

    in_stream = shape.consumer in norms
    return Problem(shape, x, weights, consume[shape.consumer], bias, ended, add if in_stream else None)


def _rope(m: int, qkv: Tensor) -> Callable[[Tensor], None]:
    rope = QkRope(16, 8, 128, 1e-6, _random(2, 128), rope_table(128, 1e6, m, "cuda"))
    positions = torch.arange(m, dtype=torch.int32, device="cuda")
    return lambda y: qk_norm_rope(y, positions, rope, y if y.dim() == 2 else qkv)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(0.05).bfloat16()


def candidates(shape: Shape, m: int) -> Iterator[GemmPlan]:
    """Plans worth a measurement.

    Of tiles 16 to 128 high, 32 to 128 wide and 64 or 128 deep, 1 to 8 parts of K and 2 to 4 stages, those won
    on an H200 that are 16 to 64 high, have 4 stages and K in parts as here, or in one part with SwiGLU fused
    and 128 deep; from 384 rows on none but the widest, and that for K = 4096 alone.
    """
    heights = (16,) if m <= 16 else (16, m) if m < 64 else (64,)
    widths = (32, 64, 128) if m <= 256 else (128,)
    parts = (2, 4) if shape.k <= 1024 else (4,) if shape.k < 4096 else (4, 8)
    for block_m, block_n, block_k, splits in product(heights, widths, (64, 128), parts):
        stages = max(2, min(4, shape.k // splits // block_k))
        plan = GemmPlan(splits, block_m, block_n, block_k, stages, warps=4)
        if _worthwhile(plan, shape, m):
            yield plan
    if shape.ending == "sum":
        return
    for block_m, block_n in product(heights, widths):
        plan = GemmPlan(1, block_m, block_n, 128, stages=4, warps=4, fused=shape.ending)
        if _worthwhile(plan, shape, m):
            yield plan


def _worthwhile(plan: GemmPlan, shape: Shape, m: int) -> bool:
    columns = shape.n // 2 if plan.swiglu else shape.n
    count = -(-m // plan.block_m) * (columns // plan.block_n) * plan.splits
    return plan.fits(shape.n, shape.k) and count in PROGRAMS and plan.shared_bytes <= SHARED_BYTES


def skinny_candidates(shape: Shape, m: int) -> Iterator[SkinnyPlan]:
    """Plans of skinny_gemm worth a measurement: about a block a processor.

    x comes all at once, or through a ring as deep as fits, or through one so short that two blocks share a
    processor and the next product starts to fetch.
    """
    gated = (False, True) if shape.consumer == "silu" else (False,)
    for swiglu, groups, cluster, splits in product(gated, (1, 2, 3), (1, 2), (1, 2, 3, 4, 6, 8, 12, 16)):
        whole = SkinnyPlan(splits, groups, cluster, shape.k // (splits * CHUNK), swiglu)
        blocks = whole.grid(shape.n)[0] * splits
        if m > TOKEN_TILES[-1] or blocks not in SKINNY_BLOCKS:
            continue
        fixed = replace(whole, stages=0).shared_bytes(m, shape.k)
        rings = {
            (limit - fixed) // (token_tile(m) * CHUNK * 2) for limit in (SHARED_BYTES, SHARED_BYTES // 2)
        }
        for stages in sorted({min(ring, whole.stages) for ring in rings}, reverse=True):
            plan = replace(whole, stages=stages)
            if plan.fits(m, shape.n, shape.k):
                yield plan


def tune(shape: Shape, rows: Sequence[int], deadline: float) -> Iterator[dict[str, object]]:
    """Measure every candidate at every number of rows; one line of the table each."""
    if time.monotonic() > deadline:
        say(f"{shape.name}: out of time, left to cuBLAS")
        return
    weights = [_random(shape.n, shape.k) for _ in range(NUM_WEIGHTS)]
    problems = {m: problem(shape, m, weights) for m in rows}
    _compile(problems)
    for m in rows:
        if time.monotonic() > deadline:
            say(f"{shape.name} M={m}: out of time, left to cuBLAS")
            return
        yield choose(problems[m])


def _compile(problems: dict[int, Problem]) -> None:
    """All candidates' kernels, in parallel: one after another they would take minutes."""
    from rose.kernels.jit.compile import compiling

    with compiling(threads=16):
        for m, one in problems.items():
            short = replace(one, weights=one.weights[:1])
            plans: list[GemmPlan | SkinnyPlan] = [*candidates(one.shape, m), *_skinny_plans(one)]
            for plan in plans:
                short.enqueue(plan)


def _skinny_plans(one: Problem) -> list[SkinnyPlan]:
    return [] if skinny_kernels() is None else list(skinny_candidates(one.shape, len(one.x)))


def choose(one: Problem) -> dict[str, object]:
    """The table's line for one shape and number of rows. A plan that cannot run is reported and left out."""
    m, shape = len(one.x), one.shape
    baseline = graph_us(partial(one.enqueue, None)) / NUM_WEIGHTS
    best, us = fastest(one, candidates(shape, m), baseline)
    say(f"{shape.name:13} M={m:4} cuBLAS {baseline:6.2f} us, best {us:6.2f} us: {best or 'cuBLAS'}")
    return {**line(one, best, us), "cublas_us": round(baseline, 2)}


def line(one: Problem, plan: GemmPlan | None, us: float) -> dict[str, object]:
    """The table's line where `plan` takes `us` microseconds and is the best without skinny_gemm."""
    skinny, skinny_us = fastest(one, _skinny_plans(one), us)
    entry: dict[str, object] = {
        "n": one.shape.n,
        "k": one.shape.k,
        "ending": one.shape.ending,
        "max_m": len(one.x),
        "plan": None if plan is None else asdict(plan),
        "us": round(us, 2),
    }
    if skinny is None:
        return entry
    say(f"{one.shape.name:13} M={len(one.x):4} {us:6.2f} us, by skinny_gemm {skinny_us:6.2f} us: {skinny}")
    return {**entry, "skinny": asdict(skinny), "skinny_us": round(skinny_us, 2)}


def fastest(one: Problem, plans: Iterable[Plan], baseline_us: float) -> tuple[Plan | None, float]:
    """The fastest of `plans` and its microseconds; None and baseline_us if none is faster by MIN_GAIN.

    A plan that cannot run is reported and left out.
    """
    best, best_us = None, baseline_us * (1 - MIN_GAIN)
    for plan in plans:
        try:
            plan_us = graph_us(partial(one.enqueue, plan)) / NUM_WEIGHTS
        except Exception as error:  # whatever a compiler or a device raises: the others still count
            say(f"  {plan}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if plan_us < best_us:
            best, best_us = plan, plan_us
    return (None, baseline_us) if best is None else (best, best_us)


def tune_skinny(shape: Shape, known: Mapping[WeightKey, Sequence[GemmChoice]]) -> Iterator[dict[str, object]]:
    """Lines for the rows that skinny_gemm can take, with the plans of `known` as the best without it."""
    weights = [_random(shape.n, shape.k) for _ in range(NUM_WEIGHTS)]
    problems = {m: problem(shape, m, weights) for m in TOKEN_TILES}
    _compile(problems)
    for m, one in problems.items():
        choices = known.get(shape.key, ())
        plan = next((choice.plan for choice in choices if m <= choice.max_m), None)
        if plan is None or isinstance(plan, GemmPlan):
            yield line(one, plan, graph_us(partial(one.enqueue, plan)) / NUM_WEIGHTS)


def merge(old: Sequence[dict[str, object]], new: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The lines of both, of the new ones where both have one for the same rows of the same weight."""

    def place(entry: dict[str, object]) -> tuple[object, ...]:
        return entry["n"], entry["k"], entry["ending"], entry["max_m"]

    merged = {place(entry): entry for entry in (*old, *new)}
    return list(merged.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = tuner_parser("rose.kernels.tune_gemm", __doc__, TABLE_PATH, budget_s=80.0)
    parser.add_argument(
        "--skinny-only", action="store_true", help="keep the table's plans, add those of skinny_gemm"
    )
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.budget_s
    lines: list[dict[str, object]] = []
    device = torch.cuda.get_device_name()
    if arguments.skinny_only:
        old, known = in_use(TABLE_PATH, read_choices), in_use(TABLE_PATH, read_table)
        for shape in SHAPES:
            lines += tune_skinny(shape, known)
        write_choices(arguments.out, device, merge(old, lines))
        return
    for shape in SHAPES:
        lines += tune(shape, ROWS, deadline)
        write_choices(arguments.out, device, lines)
    say(f"wrote {len(lines)} choices to {arguments.out}")


if __name__ == "__main__":
    main()
