"""GPU time of every fused kernel and of whole forwards at pplx-embed-0.6b's shapes, inside CUDA graphs.

    python3 docs/benchmarks/kernels.py --out DIR [--only kernels|forward|passes|programmatic]

Writes DIR/kernels.json and prints the same as tables. A part that fails prints its error; the others go on.
A kernel's time is the mean of 28 calls in one graph on the same tensors: as in a forward, small batches find
their activations in the L2 cache. GB/s counts what the kernel must read and write once.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.attention.backends import load_backends
from rose.attention.base import AttentionBackend
from rose.config import load_config
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels import activation, embedding, norm, pooling, rope
from rose.kernels.timing import graph_us
from rose.layers import workspace
from rose.layers.decoder import DecoderLayer
from rose.models.qwen3 import Qwen3Model
from rose.weights import DummyWeights

PRESET = Path(__file__).resolve().parents[2] / "rose" / "presets" / "pplx-embed"
TOKENS = (16, 128, 512, 4096, 16384, 51200)
BATCHES = ((1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (1, 4096), (16, 512), (32, 128), (100, 512))
HIDDEN, INNER, WIDTH, LAYERS = 1024, 3072, 4096, 28


@dataclass(frozen=True)
class Kernel:
    """One call to time, and the bytes that it must move."""

    name: str
    call: Callable[[], object]
    moved_bytes: int


def random(*shape: int) -> Tensor:
    """bf16 values around 1."""
    return torch.randn(shape, device="cuda").bfloat16()


def offsets(num_seqs: int, length: int) -> Tensor:
    """i32[S+1] of equally long sequences."""
    return torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32) * length


def kernels(tokens: int) -> Iterator[Kernel]:
    """Every kernel of the Qwen3 and BERT forwards at `tokens` rows."""
    x, residual, out = (random(tokens, HIDDEN) for _ in range(3))
    qkv, gate_up, gated = random(tokens, WIDTH), random(tokens, 2 * INNER), random(tokens, INNER)
    rms = norm.RmsNorm(random(HIDDEN), 1e-6)
    layer = norm.LayerNorm(random(HIDDEN), random(HIDDEN), 1e-5)
    bias, length = random(WIDTH), min(tokens, 512)
    cu_seqlens = offsets(tokens // length, length)
    row, ids = 2 * tokens * HIDDEN, torch.randint(0, 100_000, (tokens,), device="cuda").int()
    positions = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    table = random(151_936, HIDDEN)
    embedded = embedding.EmbeddedTokens(residual, out, positions)
    yield Kernel(
        "embed_tokens", lambda: embedding.embed_tokens(ids, cu_seqlens, table, rms, embedded), 3 * row
    )
    yield Kernel("add_rms_norm", lambda: norm.add_rms_norm(x, residual, rms, out), 4 * row)
    if tokens <= 512:
        for splits in (4, 8):
            partials = random(splits, tokens, HIDDEN)
            call = lambda partials=partials: norm.add_rms_norm(partials, residual, rms, out)  # noqa: E731
            yield Kernel(f"add_rms_norm of {splits} partials", call, (3 + splits) * row)
    heads = rope.QkRope(16, 8, 128, 1e-6, random(2, 128), rope.rope_table(128, 1e6, 32768, "cuda"))
    places = torch.arange(tokens, device="cuda").int() % length
    yield Kernel("qk_norm_rope", lambda: rope.qk_norm_rope(qkv, places, heads, qkv), 6 * row)
    yield Kernel("silu_mul", lambda: activation.silu_mul(gate_up, gated), 9 * row)
    scratch = pooling.pool_scratch(HIDDEN, "cuda")
    vectors = torch.zeros(len(cu_seqlens) - 1, HIDDEN, device="cuda")
    outputs = Outputs(vectors, torch.zeros_like(vectors, dtype=torch.int8))
    last = pooling.LastHidden(x, residual, rms)
    yield Kernel(
        "norm_mean_pool", lambda: pooling.norm_mean_pool(last, cu_seqlens, outputs, scratch), 2 * row
    )
    yield Kernel("mean_pool", lambda: pooling.mean_pool(x, cu_seqlens, outputs, scratch), row)
    yield Kernel("norm_gather_rows", lambda: pooling.norm_gather_rows(last, cu_seqlens, "last", outputs), 0)
    yield Kernel("bias_gelu 4096", lambda: activation.bias_gelu(qkv, bias, qkv), 8 * row)
    yield Kernel("add_layer_norm", lambda: norm.add_layer_norm(x, residual, layer.bias, layer, out), 3 * row)


def time_kernels() -> Iterator[dict[str, object]]:
    """A row a kernel and number of tokens."""
    for tokens in TOKENS:
        for kernel in kernels(tokens):

            def repeated(kernel: Kernel = kernel) -> None:
                for _ in range(LAYERS):
                    kernel.call()

            us = graph_us(repeated) / LAYERS
            gbps = kernel.moved_bytes / us / 1e3
            print(f"{tokens:6} tokens  {kernel.name:28} {us:9.2f} us  {gbps:7.0f} GB/s", flush=True)
            yield {"tokens": tokens, "kernel": kernel.name, "us": round(us, 2), "gb_per_s": round(gbps)}


class NoAttention:
    """Leaves its output as it is."""

    name = "none"
    capturable = True

    def plan(self, host_cu_seqlens: np.ndarray, num_tokens: int, slot: int) -> None:
        """Nothing to do."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu: Tensor, max_seqlen: int) -> None:
        """Nothing to do."""


def batch_of(num_seqs: int, length: int, attention: AttentionBackend) -> DeviceBatch:
    """Random ids, planned."""
    cu_seqlens = offsets(num_seqs, length)
    host = cu_seqlens.cpu().numpy()
    attention.plan(host, num_seqs * length, 0)
    ids = torch.randint(0, 100_000, (num_seqs * length,), device="cuda").int()
    return DeviceBatch(ids, cu_seqlens, None, host, length, attention)


def products(model: Qwen3Model, tokens: int) -> None:
    """The four products of every layer, nothing else (but SwiGLU, where a fused plan is chosen)."""
    buffers = model._workspace.rows(tokens)
    parts = [buffers.rows(start, stop) for start, stop in workspace.passes(tokens)]
    layers: list[DecoderLayer] = model._layers
    for layer in layers:
        for rows in parts:
            wide = rows.wide[: 2 * len(rows.hidden) * INNER].view(-1, 2 * INNER)
            narrow = rows.narrow[: len(rows.hidden) * INNER].view(-1, INNER)
            layer.qkv(rows.hidden, rows.qkv, rows.partials)
            layer.output(rows.context, rows.hidden, rows.partials)
            layer.gate_up._projection(rows.hidden, wide, rows.partials)
            layer.down(narrow, rows.hidden, rows.partials)


def time_forwards() -> Iterator[dict[str, object]]:
    """A row a batch: whole forwards with each attention backend, without attention, and products alone."""
    config = load_config(PRESET)
    longest = max(num_seqs * length for num_seqs, length in BATCHES)
    model = Qwen3Model(config, DummyWeights(0, "cuda"), torch.bfloat16, torch.device("cuda"), longest)
    backends = load_backends(model.attention_spec, compile_missing=False)
    print(f"attention backends: {', '.join(backends)}; {model._workspace}")
    for num_seqs, length in BATCHES:
        row = time_forward(model, backends, num_seqs, length)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        yield row


def time_forward(
    model: Qwen3Model, backends: Mapping[str, AttentionBackend], num_seqs: int, length: int
) -> dict[str, object]:
    """Microseconds of one batch, whole and in parts."""
    tokens = num_seqs * length
    vectors = torch.zeros(num_seqs, HIDDEN, device="cuda")
    outputs = Outputs(vectors, torch.zeros_like(vectors, dtype=torch.int8))
    replays = 3 if tokens > 8192 else 10
    row: dict[str, object] = {"batch": f"{num_seqs}x{length}"}
    row["products_us"] = round(graph_us(lambda: products(model, tokens), replays), 1)
    for name, backend in {"without_attention": NoAttention(), **backends}.items():
        try:
            batch = batch_of(num_seqs, length, backend)
            row[f"{name}_us"] = round(graph_us(lambda: model.forward(batch, outputs), replays), 1)  # noqa: B023
        except Exception as error:
            print(f"{row['batch']} {name}: {type(error).__name__}: {str(error)[:200]}")
    return row


def time_passes() -> Iterator[dict[str, object]]:
    """Large batches with other lengths of a pass, attention left out."""
    config = load_config(PRESET)
    for pass_rows in (1024, 2048, 3072, 4096, 8192, 65536):
        workspace.PASS_ROWS = pass_rows
        model = Qwen3Model(config, DummyWeights(0, "cuda"), torch.bfloat16, torch.device("cuda"), 51200)
        for num_seqs in (8, 16, 32, 100):
            row = {"pass_rows": pass_rows, **time_forward(model, {}, num_seqs, 512)}
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            yield row
        del model
        torch.cuda.empty_cache()


def time_programmatic() -> Iterator[dict[str, object]]:
    """The forwards again, with kernels brought up while the one before still runs."""
    from rose.kernels.jit.compile import programmatic

    token = programmatic.set(True)
    try:
        yield from time_forwards()
    finally:
        programmatic.reset(token)


def collected(rows: Iterator[dict[str, object]]) -> list[dict[str, object]]:
    """All rows up to the first failure, whose traceback is printed."""
    found: list[dict[str, object]] = []
    try:
        with torch.inference_mode():
            for row in rows:
                found.append(row)  # noqa: PERF402
    except Exception:
        traceback.print_exc()
    return found


def main() -> None:
    """Run the parts asked for and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parts = {
        "kernels": time_kernels,
        "forward": time_forwards,
        "programmatic": time_programmatic,
        "passes": time_passes,
    }
    parser.add_argument("--only", choices=list(parts))
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(parts)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {name: collected(parts[name]()) for name in names}
    (arguments.out / "kernels.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
