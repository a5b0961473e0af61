"""The command `python -m rose.attention.tune`: measures the attention backends here, writes the policy table.

Every backend at hand runs every batch of the grid in a CUDA graph of as many calls as its model has layers,
launched as in a forward, is checked against fp32, and its host plan is timed apart. Where layers norm and
rotate q and k, that is part of it: some backends do it themselves. Under a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose.aot.folders import user_cache
from rose.attention.backends import load_backends
from rose.attention.base import AttentionSpec, ProductAttention
from rose.attention.policy import FORMAT, USER_TABLE
from rose.attention.reference import reference_attention, relative_error
from rose.kernels.early import early_for, launching
from rose.kernels.gemm import fetches_early, gemm_plan, uses_table
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.kernels.timing import graph_us

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend
    from rose.kernels.gemm import WeightKey

# sequences x length
GRID = (
    *("1x16", "1x32", "1x64", "1x128", "1x256", "1x512", "1x1024", "1x2048", "1x4096", "4x32", "16x32"),
    *("64x16", "4x128", "8x64", "16x128"),
    *("128x50", "8x512", "16x512", "50x512", "100x512", "4x4096", "16x4096", "400x128", "512x16"),
)
MAX_ERROR = 0.02  # bf16 kernels are near 0.002
BUDGET_S = 0.04  # of replays, for one backend and batch


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


MODELS = (
    Model(128, 16, 8, 28, hidden=1024),  # pplx-embed 0.6B
    Model(128, 16, 8, 28, causal=True, hidden=1024),  # Qwen3-Embedding 0.6B
    Model(64, 16, 16, 24),  # BGE-M3
    Model(32, 12, 12, 12),  # bge-small, MiniLM
)


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
        # Checking all of a large batch would take longer than timing it.
        self.checked = sorted({0, num_seqs // 3, num_seqs - 1})

    def forward(self, backend: AttentionBackend) -> None:
        """One layer's attention, into `out`; rotation in place starts from what the call before left."""
        if self.rope is not None and isinstance(backend, ProductAttention):
            backend.forward_product(self.product, self.rope, self.out, self.cu_seqlens)
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


def time_plan(backend: AttentionBackend, batch: Batch) -> float:
    """Microseconds on the host of planning `batch`, the median of 20."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        backend.plan(batch.host_cu_seqlens, batch.num_tokens, 0)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def time_forward(backend: AttentionBackend, batch: Batch, layers: int) -> float:
    """Microseconds on the device of `layers` calls in one CUDA graph."""

    def enqueue() -> None:
        with launching(batch.early):
            for _ in range(layers):
                batch.forward(backend)

    torch.cuda.synchronize()  # the plan, if there is one, was copied on another stream
    return graph_us(enqueue, budget_s=BUDGET_S)


def measure(model: Model, backends: dict[str, AttentionBackend], batch: Batch) -> dict[str, Any]:
    """One cell of the table: every sound backend's times, and every backend's error."""
    us, plan_us, errors = {}, {}, {}
    for name, backend in backends.items():
        batch.restart()
        backend.plan(batch.host_cu_seqlens, batch.num_tokens, 0)
        batch.forward(backend)
        errors[name] = round(batch.error(), 5)
        if not errors[name] <= MAX_ERROR or not backend.capturable:
            continue
        plan_us[name] = round(time_plan(backend, batch), 1)
        us[name] = round(time_forward(backend, batch, model.layers), 1)
    return {
        "head_dim": model.head_dim, "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads,
        "causal": model.causal, "num_tokens": batch.num_tokens, "num_seqs": batch.num_seqs,
        "us": us, "plan_us": plan_us, "rel_error": errors,
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


def run(arguments: argparse.Namespace, report: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """Measure all; the table as JSON values, and whether every backend was right everywhere."""
    device = torch.device("cuda", torch.cuda.current_device())
    cells, sound = [], True
    for model in MODELS:
        if arguments.head_dim and model.head_dim not in arguments.head_dim:
            continue
        spec = AttentionSpec(
            model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5,
            model.causal, torch.bfloat16, device,
        )  # fmt: skip
        backends = load_backends(spec, arguments.aot)
        report(f"{model}: {', '.join(backends)}")
        for shape in arguments.shape or GRID:
            num_seqs, length = (int(number) for number in shape.split("x"))
            cell = measure(model, backends, Batch(spec, num_seqs, length, model.qkv))
            sound &= len(cell["us"]) == sum(backend.capturable for backend in backends.values())
            cells.append(cell)
            report(_line(shape, cell))
    table = {
        "format": FORMAT,
        "device": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "note": f"torch {torch.__version__}; us of all layers, in a CUDA graph; plan_us of the host",
        "cells": cells,
    }
    return table, sound


def _line(shape: str, cell: dict[str, Any]) -> str:
    parts = [
        f"{name} {cell['us'].get(name, 'LEFT OUT')} (plan {cell['plan_us'].get(name, '-')}, error {error})"
        for name, error in cell["rel_error"].items()
    ]
    return f"  {shape:>8}: " + "; ".join(parts)


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
    table, sound = run(arguments, lambda line: print(line, flush=True))  # noqa: T201
    dump(table, arguments.out)
    print(f"wrote {arguments.out}: {len(table['cells'])} batches")  # noqa: T201
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
