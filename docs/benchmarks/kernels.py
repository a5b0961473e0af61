"""GPU time of a model's fused kernels and of its whole forwards, inside CUDA graphs.

    python3 docs/benchmarks/kernels.py [--model pplx-embed|bge-m3] [--dtype fp8] [--quick] [--out DIR]
        [--batch 16x512 ...] [--attention NAME ...]

Prints tables, and writes DIR/kernels.json. --quick: forwards only. --batch: of these batches. --attention:
by each of these backends in turn, in place of the policy's choice. A part that fails prints its error; the
others go on. --dtype fp8: the kernels that only its forwards launch, and how far its vectors are from fp32's:
the least cosine of a batch, and the greatest difference of two numbers of vectors of length 1. A kernel's
time is the mean of 28 calls in one graph on the same tensors: as in a forward, small batches find their
activations in the L2 cache. GB/s counts what the kernel must read and write once.
Takes about half a minute on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.attention.backends import load_backends
from rose.attention.base import AttentionBackend, BatchShape, begin
from rose.attention.policy import choose
from rose.config import ModelConfig, load_config
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels import absorbed, activation, embedding, fp8, norm, one_query, pooling, rope, token_qkv
from rose.kernels.early import Early, early_for, launching
from rose.kernels.fused import gains_early
from rose.kernels.gemm import fetches_early, gemm_plan
from rose.kernels.timing import graph_us
from rose.layers import decoder, encoder
from rose.layers.compile_ahead import NoAttention
from rose.layers.fp8_decoder import Fp8DecoderLayer
from rose.layers.fp8_encoder import Fp8EncoderLayer
from rose.layers.fp8_linear import Fp8Linear
from rose.layers.fp8_weights import Fp8Weights
from rose.models import bert, qwen3
from rose.reference import reference_vectors
from rose.weights import DummyWeights

PRESETS = Path(__file__).resolve().parents[2] / "rose" / "presets"
TOKENS = (16, 128, 256, 512, 1024, 4096, 51200)
BATCHES = ("1x16", "1x64", "1x128", "1x256", "1x512", "1x4096", "16x512", "32x128", "100x512")
CALLS = 28
HOLD_US = 400_000
DEVICE = torch.device("cuda")
Model = qwen3.Qwen3Model | bert.BertModel


@dataclass(frozen=True)
class Kernel:
    """One call to time, and the bytes that it must move."""

    name: str
    call: Callable[[], object]
    moved_bytes: int


def random(*shape: int) -> Tensor:
    """bf16 values around 1."""
    return torch.randn(shape, device=DEVICE).bfloat16()


def offsets(num_seqs: int, length: int) -> Tensor:
    """i32[S+1] of equally long sequences."""
    return torch.arange(num_seqs + 1, device=DEVICE, dtype=torch.int32) * length


def decoder_kernels(config: ModelConfig, tokens: int) -> Iterator[Kernel]:
    """Those of a Qwen3 forward."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    x, residual, out = (random(tokens, hidden) for _ in range(3))
    qkv, gate_up, gated = random(tokens, width), random(tokens, 2 * inner), random(tokens, inner)
    rms, length = norm.RmsNorm(random(hidden), 1e-6), min(tokens, 512)
    cu_seqlens = offsets(tokens // length, length)
    row, ids = 2 * tokens * hidden, torch.randint(0, 100_000, (tokens,), device=DEVICE).int()
    places = torch.arange(tokens, device=DEVICE).int() % length
    table, embedded = random(config.vocab_size, hidden), embedding.EmbeddedTokens(residual, out, places)
    yield Kernel(
        "embed_tokens", lambda: embedding.embed_tokens(ids, cu_seqlens, table, rms, embedded), 3 * row
    )
    yield Kernel("add_rms_norm", lambda: norm.add_rms_norm(x, residual, rms, out), 4 * row)
    if tokens <= 512:
        partials = random(4, tokens, hidden)
        yield Kernel("add_rms_norm of 4", lambda: norm.add_rms_norm(partials, residual, rms, out), 7 * row)
    cos_sin = rope.rope_table(config.head_dim, 1e6, 4096, DEVICE)
    weight = random(2, config.head_dim)
    heads = rope.QkRope(config.num_heads, config.num_kv_heads, config.head_dim, 1e-6, weight, cos_sin)
    rotated = 4 * tokens * heads.rotated_heads * config.head_dim
    yield Kernel("qk_norm_rope", lambda: rope.qk_norm_rope(qkv, places, heads, qkv), rotated)
    looked_up = token_qkv.RotaryQkvTable(random(config.vocab_size, width), heads)
    rows = token_qkv.QkvRows(residual, qkv, places)
    call = lambda: token_qkv.embed_rotary_qkv(ids, cu_seqlens, table, looked_up, rows)  # noqa: E731
    yield Kernel("embed_rotary_qkv", call, 2 * row + 4 * tokens * width)
    yield Kernel("silu_mul", lambda: activation.silu_mul(gate_up, gated), 6 * tokens * inner)
    vectors = torch.zeros(len(cu_seqlens) - 1, hidden, device=DEVICE)
    outputs = Outputs(vectors, torch.zeros_like(vectors, dtype=torch.int8))
    last, scratch = pooling.LastHidden(x, residual, rms), pooling.pool_scratch(hidden, DEVICE)
    yield Kernel(
        "norm_mean_pool", lambda: pooling.norm_mean_pool(last, cu_seqlens, outputs, scratch), 2 * row
    )
    yield Kernel("norm_gather_rows", lambda: pooling.norm_gather_rows(last, cu_seqlens, "last", outputs), 0)


def encoder_kernels(config: ModelConfig, tokens: int) -> Iterator[Kernel]:
    """Those of a BERT forward."""
    hidden, inner = config.hidden_size, config.intermediate_size
    x, residual, out = (random(tokens, hidden) for _ in range(3))
    wide, bias, length = random(tokens, inner), random(inner), min(tokens, 512)
    layer, cu_seqlens = (
        norm.LayerNorm(random(hidden), random(hidden), 1e-5),
        offsets(tokens // length, length),
    )
    row, ids = 2 * tokens * hidden, torch.randint(0, 100_000, (tokens,), device=DEVICE).int()
    word, position, kind = random(config.vocab_size, hidden), random(600, hidden), random(2, hidden)
    tables = embedding.BertTables(word, position, kind, layer, 2)
    yield Kernel("embed_bert", lambda: embedding.embed_bert(ids, cu_seqlens, None, tables, out), 2 * row)
    sizes, packed = (config.vocab_size, 598, 2), random(tokens, 3 * hidden)
    products = token_qkv.BertQkvTables(*(random(n, 3 * hidden) for n in sizes), random(3 * hidden).float())
    both, into = (tables, products), (out, packed)
    call = lambda: token_qkv.embed_bert_qkv(ids, cu_seqlens, None, both, into)  # noqa: E731
    yield Kernel("embed_bert_qkv", call, 8 * row)
    yield Kernel("add_layer_norm", lambda: norm.add_layer_norm(x, residual, layer.bias, layer, out), 3 * row)
    if tokens <= 512:
        partials, sums = random(4, tokens, hidden), random(2, tokens, 3 * hidden)
        call = lambda: norm.add_layer_norm(partials, residual, layer.bias, layer, out)  # noqa: E731
        yield Kernel("add_layer_norm of 4", call, 6 * row)
        qkv_bias = random(3 * hidden)
        yield Kernel("add_bias of 2", lambda: activation.add_bias(sums, qkv_bias, packed), 9 * row)
    yield Kernel("bias_gelu", lambda: activation.bias_gelu(wide, bias, wide), 4 * tokens * inner)
    vectors = torch.zeros(len(cu_seqlens) - 1, hidden, device=DEVICE)
    scratch = pooling.pool_scratch(hidden, DEVICE)
    yield Kernel("mean_pool", lambda: pooling.mean_pool(x, cu_seqlens, Outputs(vectors), scratch), row)
    heads = config.num_heads, config.head_dim
    q, k, v = random(tokens, 3, *heads).unbind(1)
    query = one_query.OneQuery("first", config.head_dim**-0.5)
    picked = one_query.PickedRows(
        *random(2, len(vectors), hidden), one_query.one_query_scratch(config.head_dim, DEVICE)
    )
    yield Kernel(
        "one_query_attention",
        lambda: one_query.one_query_attention((q, k, v), x, cu_seqlens, query, picked),
        2 * row,
    )
    parts = absorbed.AbsorbedHeads(*random(3, hidden, hidden), *random(2, hidden), config.num_heads)
    if absorbed.absorbs(x, len(vectors), parts, wide.view(-1)):
        room = replace(picked, scratch=wide.view(-1))
        yield Kernel(
            "absorbed_attention",
            lambda: absorbed.absorbed_attention(x, cu_seqlens, parts, query, room),
            row + 6 * hidden * hidden,
        )


def fp8_kernels(config: ModelConfig, tokens: int) -> Iterator[Kernel]:
    """Those that only a forward with FP8 products launches, and these products."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    x, residual, context, wide = (random(tokens, width) for width in (hidden, hidden, query, 2 * inner))
    layer, rms = norm.LayerNorm(random(hidden), random(hidden), 1e-5), norm.RmsNorm(random(hidden), 1e-6)
    narrow, bias = wide.view(-1)[: tokens * inner].view(tokens, inner), random(inner)
    rows = {width: fp8.Fp8Rows.empty(tokens, width, DEVICE) for width in {hidden, query, inner}}
    normed = fp8.NormedRows(random(tokens, hidden), rows[hidden])
    yield Kernel("quantize_rows", lambda: fp8.quantize_rows(context, rows[query]), 3 * tokens * query)
    row = tokens * hidden
    if config.architecture == "qwen3":
        qkv, widened = query + 2 * config.num_kv_heads * config.head_dim, 2 * inner
        into = rows[hidden]
        yield Kernel("add_rms_norm_fp8", lambda: fp8.add_rms_norm_fp8(x, residual, rms, into), 7 * row)
        yield Kernel("silu_mul_fp8", lambda: fp8.silu_mul_fp8(wide, rows[inner]), 5 * tokens * inner)
    else:
        qkv, widened = 3 * hidden, inner
        args = (x, residual, layer.bias, layer, normed)
        yield Kernel("add_layer_norm_fp8", lambda: fp8.add_layer_norm_fp8(*args), 7 * row)
        yield Kernel(
            "bias_gelu_fp8", lambda: fp8.bias_gelu_fp8(narrow, bias, rows[inner]), 3 * tokens * inner
        )
    for n, k in ((qkv, hidden), (hidden, query), (widened, hidden), (hidden, inner)):
        fp8.quantize_rows(random(tokens, k), rows[k])
        weight = fp8.quantized(torch.randn(n, k, device=DEVICE), fp8.Fp8Rows.empty(n, k, DEVICE))
        call = partial(Fp8Linear(weight), rows[k], random(tokens, n))
        yield Kernel(f"product {n} x {k}", call, tokens * (k + 2 * n) + n * k)


def time_kernels(config: ModelConfig, dtype: str) -> Iterator[dict[str, object]]:
    """A row a kernel and number of tokens."""
    kernels = decoder_kernels if config.architecture == "qwen3" else encoder_kernels
    if dtype == "fp8":
        kernels = fp8_kernels
    for tokens in TOKENS:
        for kernel in kernels(config, tokens):

            def repeated(kernel: Kernel = kernel) -> None:
                for _ in range(CALLS):
                    kernel.call()

            us = graph_us(repeated, replays=3 if tokens > 4096 else 10) / CALLS
            gbps = kernel.moved_bytes / us / 1e3
            print(f"{tokens:6} tokens  {kernel.name:20} {us:9.2f} us  {gbps:7.0f} GB/s", flush=True)
            yield {"tokens": tokens, "kernel": kernel.name, "us": round(us, 2), "gb_per_s": round(gbps)}


def batch_of(num_seqs: int, length: int, attention: AttentionBackend) -> DeviceBatch:
    """Random ids, planned."""
    cu_seqlens = offsets(num_seqs, length)
    host = cu_seqlens.cpu().numpy()
    attention.plan(host)
    begin(attention, cu_seqlens, num_seqs * length)
    ids = torch.randint(0, 100_000, (num_seqs * length,), device=DEVICE).int()
    return DeviceBatch(ids, cu_seqlens, None, host, length, attention)


def products(model: Model, tokens: int) -> None:
    """The four products of every layer with what is part of their kernels; BERT's with bias and GELU.

    On what the last forward left, which none of them changes for itself.
    """
    fetches, gains = fetches_early(tokens, model._keys), gains_early(tokens, model._keys)
    with launching(early_for(tokens, fetches, DEVICE, gains)):
        (encoder_products if isinstance(model, bert.BertModel) else decoder_products)(model, tokens)


def encoder_products(model: Any, tokens: int) -> None:
    """Of a BertModel; FP8's without what follows."""
    buffers = model._buffers.rows(tokens)
    for layer in model._layers:
        if isinstance(layer, Fp8EncoderLayer):
            narrow, inner = (
                layer.scratch.rows(tokens, width.shape[1]) for width in (buffers.hidden, buffers.wide)
            )
            layer.qkv(narrow, buffers.qkv)
            layer.attention_output(narrow, buffers.dense)
            layer.widen(narrow, buffers.wide)
            layer.output(inner, buffers.dense)
            continue
        layer.qkv(buffers.hidden, buffers.qkv, buffers.partials)
        layer.attention_output._projection(buffers.context, buffers.dense, buffers.partials)
        layer.widen(buffers.attended, buffers.wide, buffers.partials)
        layer.output._projection(buffers.wide, buffers.dense, buffers.partials)


def decoder_products(model: Any, tokens: int) -> None:
    """Of a Qwen3Model; SwiGLU only where it is fused, of FP8 always."""
    rows = model._workspace.rows(tokens)
    for layer in model._layers:
        if isinstance(layer, Fp8DecoderLayer):
            inputs = [layer.scratch.rows(*x.shape) for x in (rows.hidden, rows.context, rows.narrow)]
            layer.qkv(inputs[0], rows.qkv)
            layer.output(inputs[1], rows.hidden)
            layer.gate_up(inputs[0], rows.wide, rows.narrow, inputs[2])
            layer.down(inputs[2], rows.hidden)
            continue
        layer.qkv(rows.hidden, rows.qkv, rows.partials)
        layer.output(rows.context, rows.hidden, rows.partials)
        plan = gemm_plan(tokens, rows.wide.shape[1], rows.hidden.shape[1], "swiglu")
        if plan is not None and plan.swiglu:
            layer.gate_up(rows.hidden, rows.wide, rows.narrow, rows.partials)
        else:
            layer.gate_up._projection(rows.hidden, rows.wide, rows.partials)
        layer.down(rows.narrow, rows.hidden, rows.partials)


def attentions(model: Model, batch: DeviceBatch) -> None:
    """Every layer's attention, on the heads that the last forward left."""
    for layer in model._layers:
        if isinstance(model, bert.BertModel):
            buffers = model._buffers.rows(batch.num_tokens)
            assert buffers.qkv is not None
            encoder.attend(buffers.qkv, (layer.num_heads, layer.head_dim), batch, buffers)
        else:
            decoder.attend(layer.rope, batch, model._workspace.rows(batch.num_tokens), None)


def time_batches(config: ModelConfig, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row a batch: the whole forward, without attention, and products alone; of FP8 also its error."""
    dtype, batches = arguments.dtype, [tuple(map(int, shape.split("x"))) for shape in arguments.batch]
    build: type[Model] = qwen3.Qwen3Model if config.architecture == "qwen3" else bert.BertModel
    longest = max(num_seqs * length for num_seqs, length in batches)
    plain = DummyWeights(0, "cuda")
    weights = Fp8Weights(plain, DEVICE, longest) if dtype == "fp8" else plain
    model = build(config, weights, torch.bfloat16, DEVICE, longest)
    backends = load_backends(model.attention_spec, compile_missing=False)
    print(f"attention backends: {', '.join(backends)}")
    for (num_seqs, length), attention in itertools.product(batches, arguments.attention or [None]):
        at_hand = backends if attention is None else {attention: backends[attention]}
        row = time_batch(model, at_hand, num_seqs, length)
        if dtype == "fp8":
            row |= errors(model, plain, backends[str(row["attention"])], num_seqs, length)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        yield row


def time_batch(
    model: Model, backends: Mapping[str, AttentionBackend], num_seqs: int, length: int
) -> dict[str, object]:
    """Microseconds of one batch, whole and in parts; up to 512 tokens also without early launches.

    held_us: forward after forward for HOLD_US, the better of two; what draws too much power slows down. Then
    so for products and attention alone.
    Where all layers may be one launch, that is what serves, and the rest is by a launch a kernel.
    """
    tokens, config = num_seqs * length, model.config
    vectors = torch.zeros(num_seqs, config.hidden_size, device=DEVICE)
    outputs = Outputs(vectors, torch.zeros_like(vectors, dtype=torch.int8) if config.quantizer else None)
    name = choose(model.attention_spec, BatchShape(tokens, num_seqs, length), tuple(backends))
    batch, bare = (batch_of(num_seqs, length, one) for one in (backends[name], NoAttention()))
    replays = 2 if tokens > 8192 else 10

    def timed(enqueue: Callable[[], object]) -> float:
        return round(graph_us(enqueue, replays), 1)

    row: dict[str, object] = {"batch": f"{num_seqs}x{length}", "attention": name}
    with ExitStack() as changes:
        if model._stack is not None and model._stack.takes(tokens):
            row["one_launch_us"] = timed(lambda: model.forward(batch, outputs))
            changes.enter_context(patch.object(model, "_stack", None))
        row["us"] = us = timed(lambda: model.forward(batch, outputs))
        parts = (
            ("held_us", us, lambda: model.forward(batch, outputs)),
            ("products_held_us", 0.75 * us, lambda: products(model, tokens)),
            ("attention_held_us", 0.2 * us, lambda: attentions(model, batch)),
        )
        for name, about_us, enqueue in parts:
            row[name] = round(graph_us(enqueue, max(replays, round(HOLD_US / about_us)), rounds=2), 1)
        row["without_attention_us"] = timed(lambda: model.forward(bare, outputs))
        row["products_us"] = timed(lambda: products(model, tokens))
        if tokens <= 512:
            module = bert if isinstance(model, bert.BertModel) else qwen3
            changes.enter_context(patch.object(module, "early_for", lambda *batch: Early.NO))
            row["no_early_launches_us"] = timed(lambda: model.forward(batch, outputs))
    return row


def errors(
    model: Model, weights: DummyWeights, attention: AttentionBackend, num_seqs: int, length: int
) -> dict[str, object]:
    """Of up to four sequences of a batch, against the fp32 reference."""
    batch, count = batch_of(num_seqs, length, attention), min(num_seqs, 4)
    vectors = torch.zeros(num_seqs, model.config.hidden_size, device=DEVICE)
    int8 = torch.zeros_like(vectors, dtype=torch.int8) if model.config.quantizer else None
    model.forward(batch, Outputs(vectors, int8))
    sequences = [*batch.input_ids.view(num_seqs, length)[:count].cpu().numpy()]
    expected = reference_vectors(model.config, weights, sequences, device="cuda").double()
    units = [torch.nn.functional.normalize(x, dim=1) for x in (vectors[:count].cpu().double(), expected)]
    cosine = (units[0] * units[1]).sum(1).min().item()
    return {"cosine": round(cosine, 6), "difference": round((units[0] - units[1]).abs().max().item(), 6)}


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
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["pplx-embed", "bge-m3"], default="pplx-embed")
    parser.add_argument("--dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="forwards only")
    parser.add_argument("--batch", action="append", help="sequences x length; repeatable")
    parser.add_argument("--attention", action="append", help="a backend's name; repeatable")
    parser.add_argument("--out", type=Path, help="folder for kernels.json")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or BATCHES
    config = load_config(PRESETS / arguments.model)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model}
    result["dtype"] = arguments.dtype
    if not arguments.quick:
        result["kernels"] = collected(time_kernels(config, arguments.dtype))
    result["batches"] = collected(time_batches(config, arguments))
    if arguments.out is not None:
        (arguments.out / "kernels.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
