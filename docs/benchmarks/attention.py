"""Attention alone at the power limit: every backend at hand, all layers of a model in one graph.

    python docs/benchmarks/attention.py [--model pplx-embed|bge-m3|qwen3-embedding ...] [--batch 25x512 ...]
        [--backend NAME ...] [--out FILE.json]

Queries, keys and values are random; a batch's list of work, where a backend has one, is made once a graph,
as in a forward. Each way is held in random order (holding.py). Prints microseconds held and alone, and
TFLOP/s by four operations a query, key that it sees and dimension. A few seconds a batch on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from holding import contest
from kernels import DEVICE, PRESETS, offsets

from rose.attention.backends import load_backends
from rose.attention.base import AttentionBackend, AttentionSpec, begin, input_dtype
from rose.config import ModelConfig, load_config

MODELS = ("pplx-embed", "bge-m3", "qwen3-embedding")
BATCHES = ("5x512", "25x512", "50x512", "1x4096")
# Those that serve batches of thousands of tokens.
BACKENDS = ("fa4", "flashinfer-fa3", "flashinfer-fa2", "chained")
# Layers do not attend to the same numbers, which might stay in the L2 cache.
COPIES = 4


def spec_of(config: ModelConfig) -> AttentionSpec:
    """A model's attention in bf16."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    return AttentionSpec(*heads, config.head_dim**-0.5, config.causal, torch.bfloat16, DEVICE)


class Batch:
    """Sequences of one length, with packed heads for each of COPIES layers."""

    def __init__(self, spec: AttentionSpec, num_seqs: int, length: int) -> None:
        self.cu_seqlens, self.length, self.num_tokens = offsets(num_seqs, length), length, num_seqs * length
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        shape = (self.num_tokens, sum(heads), spec.head_dim)
        packed = [torch.randn(shape, device=DEVICE).to(spec.dtype) for _ in range(COPIES)]
        self.layers = [torch.split(one, heads, dim=1) for one in packed]
        self.out = torch.empty(
            self.num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=DEVICE
        )

    def enqueue(self, backend: AttentionBackend, num_layers: int) -> None:
        """All layers' attention, as in a forward."""
        begin(backend, self.cu_seqlens, self.num_tokens)
        for layer in range(num_layers):
            q, k, v = self.layers[layer % COPIES]
            backend.forward(q, k, v, self.out, self.cu_seqlens, self.length)


def time_batch(
    config: ModelConfig, backends: Mapping[str, AttentionBackend], num_seqs: int, length: int
) -> dict[str, Any]:
    """Microseconds of all layers by backend, held and alone, and what failed."""
    spec = spec_of(config)
    batch = Batch(spec, num_seqs, length)
    for backend in backends.values():
        backend.plan(batch.cu_seqlens.cpu().numpy())
    ways = {name: partial(batch.enqueue, backend, config.num_layers) for name, backend in backends.items()}
    times = contest(ways, kept=list(ways))
    seen = (length + 1) / 2 if spec.causal else length
    work = 4 * num_seqs * length * seen * spec.num_heads * spec.head_dim * config.num_layers
    for name, us in sorted(times.held_us.items(), key=lambda item: item[1]):
        rate, alone_us = work / us / 1e6, times.alone_us[name]
        print(f"  {us:8.0f} us held {rate:4.0f} TFLOP/s  alone {alone_us:8.0f}  {name}", flush=True)
    for name, why in times.failures.items():
        print(f"  failed: {name}: {why}", flush=True)
    return {
        "held_us": dict(times.held_us),
        "alone_us": dict(times.alone_us),
        "failures": dict(times.failures),
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model and batch."""
    for model in arguments.model or MODELS:
        config = load_config(PRESETS / model)
        spec = spec_of(config)
        found = load_backends(spec, compile_missing=False)
        wanted = arguments.backend or BACKENDS
        backends = {
            name: backend
            for name, backend in found.items()
            if name in wanted and input_dtype(backend, spec) is spec.dtype
        }
        for shape in arguments.batch or BATCHES:
            num_seqs, length = map(int, shape.split("x"))
            print(f"{model} {shape}", flush=True)
            yield {"model": model, "batch": shape, **time_batch(config, backends, num_seqs, length)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="repeatable; all by default")
    parser.add_argument("--batch", action="append", help="sequences x length; repeatable")
    parser.add_argument("--backend", action="append", help=f"repeatable; {', '.join(BACKENDS)} by default")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        rows = list(measure(arguments))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
