"""Time every sensible FlatPlan against the other backends: python -m rose.attention.tune_flat --out FILE.

Every candidate runs in a CUDA graph of as many calls as its model has layers, launched as in a forward, and
is checked against fp32. Two figures of each other backend: alone, and after the kernel that norms and
rotates q and k, which attention straight from the product does without. About a minute on an H200 of 16
processor cores, most of it Triton's compiler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product as combinations
from pathlib import Path
from typing import Any

import torch

from rose.attention.flat_plan import FlatPlan
from rose.attention.tune import BGE_M3, PPLX_EMBED, Model
from rose.kernels.tables import say

MODELS = (PPLX_EMBED, BGE_M3)
SHAPES = ("1x16", "1x32", "1x64", "1x128", "1x256", "1x512", "4x128", "16x32", "8x64", "1x1024")
MAX_ERROR = 0.006


@dataclass(frozen=True, slots=True)
class Job:
    """One candidate. splits: partial sums of the product that it starts from; 0: from q, k and v."""

    model: Model
    num_seqs: int
    length: int
    plan: FlatPlan
    splits: int

    @property
    def num_tokens(self) -> int:
        """Of the batch."""
        return self.num_seqs * self.length


def plans(model: Model, num_tokens: int, length: int, from_product: bool) -> Iterator[FlatPlan]:
    """What may be fast: programs for a good part of the GPU and not for many waves, tiles that get filled."""
    group = model.num_heads // model.num_kv_heads
    for heads, block_m, block_n, warps, stages in combinations(
        {1, group}, (16, 32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)
    ):
        tokens = block_m // heads
        programs = -(-num_tokens // tokens) * (model.num_heads // heads)
        met = min(num_tokens, length + tokens - 1 if length % tokens else max(length, tokens))
        once = met <= block_n
        if programs > 1056 or (programs < 64 and tokens > 16) or tokens > max(16, num_tokens):
            continue
        if block_n > max(32, 2 * met - 1) or (warps == 4 and block_m == 128):
            continue
        if warps == 8 and block_m < 128 and not (from_product and block_n == 64):
            continue
        if stages not in ((1, 2) if from_product else (2,) if once else (2, 3)):
            continue
        if from_product and (block_n == 128 and warps == 4):
            continue  # spills
        yield FlatPlan(block_m, block_n, heads, warps, stages)


def jobs(model: Model, shape: str) -> Iterator[Job]:
    """All candidates for a batch."""
    num_seqs, length = (int(number) for number in shape.split("x"))
    num_tokens = num_seqs * length
    for plan in plans(model, num_tokens, length, from_product=False):
        yield Job(model, num_seqs, length, plan, 0)
    if model.takes_product(length):
        for plan in plans(model, num_tokens, length, from_product=True):
            yield Job(model, num_seqs, length, plan, 1)
            if num_tokens <= 128 and (plan.block_n < 64 or plan.warps == 8):  # others spill
                yield Job(model, num_seqs, length, plan, 2)


def early_of(num_tokens: int) -> int:
    """How kernels of such a forward are launched: as rose.kernels.early says, with built skinny_gemm."""
    return 1 if num_tokens <= 64 else 2 if num_tokens <= 128 else 0


class Tensors:
    """A batch's product, parts of it and offsets. Products of partial sums keep their values when read."""

    def __init__(self, model: Model, num_seqs: int, length: int, device: torch.device) -> None:
        from rose.kernels.rope import QkRope, rope_table

        self.spec = spec = model.spec(device)
        num_tokens, self.length = num_seqs * length, length
        self._heads = heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        shape = (3, num_tokens, sum(heads) * spec.head_dim)
        self.sums = torch.randn(shape, device=device).bfloat16()
        self.qkv = self.sums[2]
        self.q, self.k, self.v = self._parts(self.qkv)
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length
        self.positions = (torch.arange(num_tokens, device=device) % length).int()
        weight = torch.ones(2, spec.head_dim, dtype=torch.bfloat16, device=device)
        table = rope_table(spec.head_dim, 1e6, 4096, device)
        self.rope = QkRope(spec.num_heads, spec.num_kv_heads, spec.head_dim, 1e-6, weight, table)

    def source(self, splits: int) -> torch.Tensor:
        """The product, or that many partial sums of it."""
        return self.sums[0] if splits == 1 else self.sums[:splits]

    def rotated(self, splits: int) -> tuple[torch.Tensor, ...]:
        """q, k and v in fp32, normed and rotated from that many partial sums."""
        from rose.kernels.rope import qk_norm_rope

        full = torch.empty_like(self.qkv, dtype=torch.float32)
        sums = self.sums[:splits].float().contiguous()
        qk_norm_rope(sums, self.positions, self.rope, full)
        return self._parts(full)

    def _parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(qkv.view(len(qkv), -1, self.spec.head_dim), self._heads, dim=1)

    def run(self, job: Job) -> None:
        """One layer's attention by a candidate."""
        from rose.kernels.jit import flat_attention as jit

        if job.splits:
            source = self.source(job.splits)
            jit.flat_attention_of_product(source, self.rope, self.cu_seqlens, self.spec, job.plan, self.out)
        else:
            jit.flat_attention((self.q, self.k, self.v), self.cu_seqlens, self.spec, job.plan, self.out)


def use_no_gpu() -> None:
    """Of a process that only compiles."""
    from triton.runtime.driver import driver

    from rose.aot.build_triton import HopperDriver

    driver.set_active(HopperDriver())


def compile_job(job: Job) -> None:
    """Put a candidate into Triton's disk cache; what fails to compile will raise when it is launched."""
    from rose.kernels.early import Early, launching
    from rose.kernels.jit.compile import compiling

    with launching(Early(early_of(job.num_tokens))), compiling(1):
        Tensors(job.model, job.num_seqs, job.length, torch.device("cpu")).run(job)


def compile_all(wanted: list[Job], processes: int) -> None:
    """Every candidate's variant once, before this process has a CUDA context that a child could inherit."""
    unlike: dict[object, Job] = {}
    for job in wanted:
        key = (job.model, job.plan, job.splits, job.num_seqs > 1, early_of(job.num_tokens))
        unlike.setdefault(key, job)
    say(f"{len(wanted)} candidates, {len(unlike)} variants")
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(processes, use_no_gpu) as pool:
        pool.map(compile_job, unlike.values(), chunksize=4)
    say(f"compiled in {time.perf_counter() - started:.1f} s")


class Measurement:
    """What is timed and checked for one batch of a model, row by row of the result."""

    def __init__(self, model: Model, shape: str, device: torch.device) -> None:
        self._model = model
        num_seqs, self._length = (int(number) for number in shape.split("x"))
        self._num_tokens = num_seqs * self._length
        self._tensors = Tensors(model, num_seqs, self._length, device)
        self._row = {"head_dim": self._tensors.spec.head_dim, "shape": shape}
        self._expected: dict[int, torch.Tensor] = {}

    def backends(self) -> Iterator[dict[str, Any]]:
        """The other backends, alone and with the kernel that norms and rotates before them."""
        from rose.attention.backends import load_backends
        from rose.attention.base import begin
        from rose.attention.reference import relative_error

        tensors = self._tensors
        for name, backend in load_backends(tensors.spec).items():
            begin(backend, tensors.cu_seqlens, self._num_tokens)

            def attend(backend: Any = backend) -> None:
                backend.forward(
                    tensors.q, tensors.k, tensors.v, tensors.out, tensors.cu_seqlens, self._length
                )

            attend()
            error = relative_error(tensors.out, self._expected_of(0))
            row = {**self._row, "name": name, "us": self._us(attend), "error": error}
            if self._model.qkv:
                for splits in (1, 2) if self._num_tokens <= 128 else (1,):
                    row[f"with_rope_of_{splits}"] = self._us_rotating(splits, attend)
            yield row

    def rotations(self) -> Iterator[dict[str, Any]]:
        """The kernel that norms and rotates, alone."""
        for splits in (1, 2) if self._model.qkv else ():
            yield {**self._row, "name": f"rope of {splits}", "us": self._us_rotating(splits)}

    def candidate(self, job: Job) -> dict[str, Any]:
        """One of our plans; "failed", where it needs more shared memory or registers than there are."""
        from rose.attention.reference import relative_error
        from rose.kernels.early import Early, launching

        name, expected = "product" if job.splits else "flat", self._expected_of(job.splits)
        row = {**self._row, "name": name, "splits": job.splits, **asdict(job.plan)}
        run = partial(self._tensors.run, job)
        try:
            self._tensors.out.fill_(float("nan"))
            with launching(Early(early_of(job.num_tokens))):
                run()
            row["error"] = error = relative_error(self._tensors.out, expected)
            row["us"] = self._us(run)
            if self._model.qkv and not job.splits and error < MAX_ERROR:
                row["with_rope_of_1"] = self._us_rotating(1, run)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        return row

    def _us(self, *kernels: Callable[[], None]) -> float:
        """Microseconds of the kernels of one layer, one after another."""
        from rose.kernels.early import Early, launching
        from rose.kernels.timing import graph_us

        def layers() -> None:
            with launching(Early(early_of(self._num_tokens))):
                for _ in range(self._model.layers):
                    for enqueue in kernels:
                        enqueue()

        torch.cuda.synchronize()  # what is timed runs on another stream
        return round(graph_us(layers), 1)

    def _us_rotating(self, splits: int, *after: Callable[[], None]) -> float:
        """The same with the kernel that norms and rotates before them; leaves q, k and v as they were."""
        from rose.kernels.rope import qk_norm_rope

        tensors = self._tensors
        source = tensors.sums[:splits] if splits > 1 else tensors.qkv
        kept = tensors.qkv.clone()
        try:
            return self._us(
                lambda: qk_norm_rope(source, tensors.positions, tensors.rope, tensors.qkv), *after
            )
        finally:
            tensors.qkv.copy_(kept)

    def _expected_of(self, splits: int) -> torch.Tensor:
        """In fp32: of q, k and v as they are, or rotated from that many partial sums."""
        from rose.attention.reference import reference_attention

        if splits not in self._expected:
            tensors = self._tensors
            q, k, v = tensors.rotated(splits) if splits else (tensors.q, tensors.k, tensors.v)
            offsets = tensors.cu_seqlens.tolist()
            self._expected[splits] = reference_attention(q, k, v, offsets, tensors.spec)
        return self._expected[splits]


def report(rows: list[dict[str, Any]], kept: int = 3) -> None:
    """A table of the other backends and the best of each kind."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "us" in row:
            key = (row["name"], row.get("splits", 0))
            groups.setdefault(key, []).append(row)
    for (name, splits), found in groups.items():
        for row in sorted(found, key=lambda row: row["us"])[:kept]:
            rope = " ".join(f"{key[5:]} {row[key]}" for key in row if key.startswith("with_rope"))
            plan = (
                "m{block_m} n{block_n} h{heads} w{warps} s{stages}".format(**row) if "block_m" in row else ""
            )
            mark = "" if row.get("error", 0) < MAX_ERROR else " WRONG"
            kind = f"{name}{f' of {splits}' if splits else ''}"
            say(f"  {kind:>18} {row['us']:8.1f} {rope} {plan} {row.get('error', 0):.5f}{mark}")
    for row in rows:
        if "failed" in row:
            say(f"  failed {row}")


def main() -> None:
    """Compile, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m rose.attention.tune_flat", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--shape", action="append", help="sequences x length; repeatable")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--compile-only", action="store_true")
    arguments = parser.parse_args()
    batches = [(model, shape) for model in MODELS for shape in arguments.shape or SHAPES]
    wanted = {(model, shape): list(jobs(model, shape)) for model, shape in batches}
    compile_all([job for found in wanted.values() for job in found], arguments.processes)
    if arguments.compile_only:
        return
    rows: list[dict[str, Any]] = []
    for (model, shape), candidates in wanted.items():
        started = time.perf_counter()
        measurement = Measurement(model, shape, torch.device("cuda", 0))
        found = [*measurement.backends(), *measurement.rotations(), *map(measurement.candidate, candidates)]
        say(f"heads of {model.head_dim}, {shape}: {time.perf_counter() - started:.1f} s")
        report(found)
        rows += found
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
