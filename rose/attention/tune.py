"""The command `python -m rose.attention.tune`: measures the attention backends here, writes the policy table.

Every backend at hand runs every batch of the grid in a CUDA graph of as many calls as its model has layers,
launched as in a forward, and is checked against fp32. Where layers norm and rotate q and k, that is part of
it: some backends do it themselves. So is the list of work that a backend's layers share. Half a minute on an
H200.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose.aot.folders import user_cache
from rose.attention import flat
from rose.attention.backends import load_backends
from rose.attention.base import AttentionSpec, Fp8Attention, ProductAttention, begin
from rose.attention.flat_plan import MAX_PRODUCT_LENGTH
from rose.attention.policy import FORMAT, IN_FP8, USER_TABLE
from rose.attention.reference import reference_attention, relative_error
from rose.kernels import dispatch
from rose.kernels.early import early_for, launching
from rose.kernels.fp8 import E4M3, E4M3_MAX
from rose.kernels.gemm import fetches_early, gemm_plan, uses_table
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.kernels.tables import say
from rose.kernels.timing import graph_us

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend
    from rose.kernels.gemm import WeightKey

# sequences x length
GRID = (
    *("1x16", "1x32", "1x64", "1x128", "1x256", "1x512", "1x1024", "1x2048", "1x4096"),
    *("4x32", "16x32", "64x16", "512x16", "64x50", "128x50", "8x64", "4x128", "16x128", "400x128"),
    *("4x512", "5x512", "8x512", "16x512", "25x512", "50x512", "100x512", "4x4096"),
)
MAX_ERROR = 0.02  # bf16 kernels are near 0.002
# Rounding q, k, v and the weights of values to three bits of fraction: 0.053 of independent random numbers.
FP8_MAX_ERROR = 0.07
BUDGET_S = 0.03  # of replays, for one backend and batch
# That compile: more would wait for each other's Python.
MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a family of models, and how often a forward runs it.

    hidden: the width of what layers project to q, k and v, which are then normed and rotated; None: they are
    attended to as they are.
    """

    head_dim: int
    num_heads: int
    num_kv_heads: int
    layers: int
    causal: bool = False
    hidden: int | None = None

    @property
    def qkv(self) -> WeightKey | None:
        """The product that is normed and rotated."""
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return None if self.hidden is None else (width, self.hidden, "sum")

    def spec(self, device: torch.device) -> AttentionSpec:
        """In bf16, and in FP8 where q and k are normed."""
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        scale, fp8 = self.head_dim**-0.5, self.hidden is not None
        return AttentionSpec(*heads, scale, self.causal, torch.bfloat16, device, fp8=fp8)

    def takes_product(self, length: int) -> bool:
        """Whether attention straight from the product is worth a try for sequences of so many tokens."""
        return self.hidden is not None and length <= MAX_PRODUCT_LENGTH


PPLX_EMBED = Model(128, 16, 8, 28, hidden=1024)
QWEN3_EMBEDDING = Model(128, 16, 8, 28, causal=True, hidden=1024)
BGE_M3 = Model(64, 16, 16, 24)
MINILM = Model(32, 12, 12, 12)
MODELS = (PPLX_EMBED, QWEN3_EMBEDDING, BGE_M3, MINILM)


class Batch:
    """Random q, k and v as strided views of one packed projection, offsets, and the fp32 answer."""

    def __init__(self, spec: AttentionSpec, num_seqs: int, length: int, qkv: WeightKey | None = None) -> None:
        """qkv: q and k are normed and rotated first, from what the product with this weight leaves."""
        self.spec, self.num_tokens, self.num_seqs, self.length = spec, num_seqs * length, num_seqs, length
        self._heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        shape = (self.num_tokens, sum(self._heads) * spec.head_dim)
        generator = torch.Generator(spec.device).manual_seed(self.num_tokens)
        self.qkv = torch.randn(shape, dtype=spec.dtype, device=spec.device, generator=generator)
        self.q, self.k, self.v = self._parts(self.qkv)
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.host_cu_seqlens = np.arange(0, self.num_tokens + 1, length, dtype=np.int32)
        self.cu_seqlens = torch.from_numpy(self.host_cu_seqlens).to(spec.device)
        fetches = qkv is not None and fetches_early(self.num_tokens, [qkv])
        self.early = early_for(self.num_tokens, fetches, spec.device)
        self.rope, self.product = None, self.qkv
        if qkv is not None:
            self.rope, self.positions = _rope(spec, length), torch.arange(self.num_tokens) % length
            self.positions = self.positions.int().to(spec.device)
            splits = _splits(self.qkv, qkv)
            self.product = self.qkv.clone() if splits == 1 else torch.stack([self.qkv] * splits)
            # Of a head that is normed; random values are smaller.
            scale = math.sqrt(spec.head_dim) / E4M3_MAX
            self._scales = torch.full((sum(self._heads),), scale, device=spec.device)
            self._fp8 = torch.empty_like(self.qkv, dtype=E4M3)
        # Checking all of a large batch would take longer than timing it.
        self.checked = sorted({0, num_seqs // 3, num_seqs - 1})

    def forward(self, backend: AttentionBackend) -> None:
        """One layer's attention, into `out`; rotation in place starts from what the call before left."""
        with launching(self.early):
            if self.rope is not None and isinstance(backend, ProductAttention):
                backend.forward_product(self.product, self.rope, self.out, self.cu_seqlens)
                return
            if self.rope is not None and isinstance(backend, Fp8Attention):
                qk_norm_rope(self.product, self.positions, self.rope, self._fp8, self._scales)
                heads = self._fp8.view(self.num_tokens, -1, self.spec.head_dim)
                backend.forward_fp8(heads, self._scales, self.out, self.cu_seqlens)
                return
            if self.rope is not None:
                source = self.product if self.product.dim() == 3 else self.qkv
                qk_norm_rope(source, self.positions, self.rope, self.qkv)
            backend.forward(self.q, self.k, self.v, self.out, self.cu_seqlens, self.length)

    def restart(self) -> None:
        """As it was before the first forward; `out` holds NaN."""
        self.out.fill_(float("nan"))
        if self.rope is not None and self.product.dim() == 2:
            self.qkv.copy_(self.product)

    def error(self) -> float:
        """Relative error of `out` over the sequences checked, the worst; for one forward after `restart`."""
        worst = 0.0
        for index in self.checked:
            rows = slice(index * self.length, (index + 1) * self.length)
            q, k, v = self._parts(self._exact(rows))
            expected = reference_attention(q, k, v, (0, self.length), self.spec)
            worst = max(worst, relative_error(self.out[rows], expected))
        return worst

    def _parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(qkv.view(len(qkv), -1, self.spec.head_dim), self._heads, dim=1)

    def _exact(self, rows: slice) -> torch.Tensor:
        """q, k and v as attention meets them, packed, in fp32 if they are rotated."""
        if self.rope is None:
            return self.qkv[rows]
        source = self.product[..., rows, :].float().reshape(-1, self.length, self.qkv.shape[1])
        exact = torch.empty(source.shape[1:], device=source.device)
        qk_norm_rope(source, self.positions[rows], self.rope, exact)
        return exact


def _rope(spec: AttentionSpec, length: int) -> QkRope:
    weight = torch.ones(2, spec.head_dim, dtype=spec.dtype, device=spec.device)
    table = rope_table(spec.head_dim, 1e6, length, spec.device)
    return QkRope(spec.num_heads, spec.num_kv_heads, spec.head_dim, 1e-6, weight, table)


def _splits(qkv: torch.Tensor, key: WeightKey) -> int:
    """In how many partial sums the product arrives."""
    plan = gemm_plan(len(qkv), *key) if uses_table(qkv) else None
    return 1 if plan is None else plan.splits


def worth_trying(
    model: Model, backends: Mapping[str, AttentionBackend], length: int
) -> dict[str, AttentionBackend]:
    """Without what starts from a product where there is none: from q, k and v it is another's kernel."""
    takes_product = model.takes_product(length)
    return {
        name: backend
        for name, backend in backends.items()
        if takes_product or not isinstance(backend, ProductAttention)
    }


def compile_ours(models: Collection[Model], shapes: Collection[str], device: torch.device) -> None:
    """Every variant of a Triton kernel that measuring will launch, several at a time."""
    from rose.kernels.jit.compile import compiling

    started = time.perf_counter()
    with compiling(min(os.cpu_count() or 1, MAX_THREADS)):
        for model in models:
            spec = model.spec(device)
            ours = {kind.name: kind(spec) for kind in flat.BACKENDS} if flat.takes(spec) else {}
            for num_seqs, length in map(parsed, shapes):
                batch = Batch(spec, num_seqs, length, model.qkv)
                for backend in worth_trying(model, ours, length).values():
                    batch.forward(backend)
    say(f"compiled in {time.perf_counter() - started:.1f} s")


def parsed(shape: str) -> tuple[int, int]:
    """Sequences and their length."""
    num_seqs, length = shape.split("x")
    return int(num_seqs), int(length)


def time_forward(backend: AttentionBackend, batch: Batch, layers: int) -> float:
    """Microseconds on the device of `layers` calls in one CUDA graph."""

    def enqueue() -> None:
        begin(backend, batch.cu_seqlens, batch.num_tokens)
        for _ in range(layers):
            batch.forward(backend)

    return graph_us(enqueue, budget_s=BUDGET_S)


def most_error(name: str) -> float:
    """Of a backend that is sound."""
    return FP8_MAX_ERROR if name in IN_FP8 else MAX_ERROR


def measure(model: Model, backends: dict[str, AttentionBackend], batch: Batch) -> dict[str, Any]:
    """One cell of the table: every sound backend's times, and every backend's error."""
    us, errors = {}, {}
    for name, backend in backends.items():
        batch.restart()
        backend.plan(batch.host_cu_seqlens)
        begin(backend, batch.cu_seqlens, batch.num_tokens)
        batch.forward(backend)
        errors[name] = round(batch.error(), 5)
        if not errors[name] <= most_error(name) or not backend.capturable:
            continue
        us[name] = round(time_forward(backend, batch, model.layers), 1)
    return {
        "head_dim": model.head_dim, "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads,
        "causal": model.causal, "num_tokens": batch.num_tokens, "num_seqs": batch.num_seqs,
        "us": us, "rel_error": errors,
    }  # fmt: skip


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m rose.attention.tune", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=user_cache() / USER_TABLE,
        help="table to write; the server reads the default, %(default)s, before those that ship",
    )  # fmt: skip
    parser.add_argument("--shape", action="append", help="sequences x length, as 16x512; repeatable")
    parser.add_argument("--head-dim", action="append", type=int, help="only models of this size; repeatable")
    parser.add_argument(
        "--aot", action="append", type=Path, help="folder of ahead-of-time kernels; repeatable"
    )
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], bool]:
    """Measure all; the table as JSON values, and whether every backend was right everywhere."""
    models = [model for model in MODELS if model.head_dim in (arguments.head_dim or [model.head_dim])]
    shapes = arguments.shape or GRID
    if dispatch.has_triton():
        compile_ours(models, shapes, device)
    cells, sound = [], True
    for model in models:
        started, spec = time.perf_counter(), model.spec(device)
        backends = load_backends(spec, arguments.aot)
        say(f"{model}, µs of all layers:\n" + _line("", backends, "fastest"))
        for num_seqs, length in map(parsed, shapes):
            worth = worth_trying(model, backends, length)
            cell = measure(model, worth, Batch(spec, num_seqs, length, model.qkv))
            sound &= len(cell["us"]) == sum(backend.capturable for backend in worth.values())
            cells.append(cell)
            say(report(f"{num_seqs}x{length}", cell, backends))
        say(f"{time.perf_counter() - started:.1f} s")
    table = {
        "format": FORMAT,
        "device": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "note": f"torch {torch.__version__}; us of all layers, in a CUDA graph",
        "cells": cells,
    }
    return table, sound


def report(shape: str, cell: dict[str, Any], backends: Collection[str]) -> str:
    """A line of the printed table; a wrong result shows its error, and what was not tried a dash."""
    us, errors = cell["us"], cell["rel_error"]
    shown = {name: f"error {error}" for name, error in errors.items() if not error <= most_error(name)}
    shown |= {name: f"{time:.1f}" for name, time in us.items()}
    fastest = min(us, key=us.__getitem__, default="none")
    return _line(shape, [shown.get(name, "-") for name in backends], fastest)


def _line(first: str, columns: Iterable[str], last: str) -> str:
    return f"{first:>10} " + "".join(f"{column:>16}" for column in columns) + f"  {last}"


def dump(table: dict[str, Any], path: Path) -> None:
    """Write a table, a cell a line."""
    head = {key: value for key, value in table.items() if key != "cells"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    cells = ",\n".join("  " + json.dumps(cell) for cell in table["cells"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + "\n".join(lines) + '\n "cells": [\n' + cells + "\n ]\n}\n")


def main(argv: list[str] | None = None) -> int:
    """Measure and write; 1 if a backend was wrong (it is left out of the table), 2 without a GPU."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to tune", file=sys.stderr)  # noqa: T201
        return 2
    table, sound = run(arguments, torch.device("cuda", torch.cuda.current_device()))
    dump(table, arguments.out)
    say(f"wrote {arguments.out}: {len(table['cells'])} batches")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
