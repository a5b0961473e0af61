"""Run as a program: compile what pplx-embed, or BGE-M3 and ModernBERT launch, for an H200, without one.

Arguments: the folder of presets; which plans products of few rows have: "chosen", so that every kernel is
launched by few rows and by many, or "measured", the table in use; and "decoder" or "encoders". Prints a JSON
object: kernel -> [16-byte global accesses, accesses narrower than 4 bytes, what it does about the kernels
before and after it] of each variant. Not in the test process, because Triton is either an interpreter or a
compiler there.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rose.aot import folders
from rose.aot.build_triton import HopperDriver
from rose.attention.base import AttentionSpec
from rose.attention.flat import FlatProductAttention
from rose.config import ModelConfig, load_config
from rose.kernels import dispatch, early, gemm
from rose.kernels import rope as rope_layout
from rose.kernels.absorbed import AbsorbedHeads, absorbed_attention, scratch_elements
from rose.kernels.jit import (
    absorbed,
    activation,
    embedding,
    flat_attention,
    fp8,
    gated,
    norm,
    one_query,
    pooling,
    rope,
    rows,
)
from rose.kernels.jit import gemm as gemm_jit
from rose.kernels.jit import token_qkv as token_qkv_jit
from rose.kernels.jit.compile import compiling
from rose.kernels.one_query import SCRATCH_ROWS, SCRATCH_TAIL, OneQuery, PickedRows
from rose.layers import decoder, encoder, fp8_linear, linear, projection, token_qkv
from rose.layers.compile_ahead import compile_ahead, row_counts
from rose.layers.fp8_weights import Fp8Weights
from rose.models import bert, qwen3
from rose.models.registry import Model
from rose.weights import DummyWeights, WeightSource

CPU = torch.device("cpu")
SPLIT = gemm.GemmPlan(4, 16, 32, 128, 4, 4)
MAX_TOKENS = 2048
MODULES = (
    absorbed, activation, embedding, flat_attention, fp8, gated, gemm_jit, norm, one_query, pooling,
    rope, rows, token_qkv_jit,
)  # fmt: skip


def main(presets: Path, plans: str, part: str) -> None:
    driver.set_active(HopperDriver())
    folders.default_folders = tuple  # what is built ahead has no PTX
    dispatch.uses_triton = lambda x: True
    projection.uses_table = lambda weight: True
    token_qkv._has_room = lambda embeddings, width: True
    early._can_launch_early = lambda device: True
    properties = SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device=None: properties  # type: ignore[assignment]
    linear.Linear.__call__ = lambda self, x, out: out  # cuBLAS compiles nothing, and a CPU takes its time
    fp8_linear.Fp8Linear.__call__ = lambda self, x, out: out
    if part == "decoder":
        compile_model(presets / "pplx-embed", qwen3, decoder, plans)
    else:
        compile_model(presets / "bge-m3", bert, encoder, plans)
        compile_windowed()
        compile_flat()
        compile_absorbed()
    print(json.dumps({name: variants(kernel) for name, kernel in kernels()}))


def compile_model(preset: Path, module: ModuleType, layers: ModuleType, plans: str) -> None:
    """All that its forwards launch, in bfloat16 and in FP8."""
    config = replace(load_config(preset), num_layers=2, vocab_size=64, max_positions=64)
    keys = layers.weight_keys(config)
    if plans == "chosen":
        table = {key: chosen(key) for key in keys}
        gemm.table = lambda: table
    model = load(module, config, keys)
    compile_ahead(model, row_counts(keys, MAX_TOKENS))
    weights = Fp8Weights(DummyWeights(), CPU, MAX_TOKENS)
    in_fp8 = load(module, config, [], weights)
    compile_ahead(in_fp8, row_counts([], MAX_TOKENS))
    stored = SimpleNamespace(fp8_swiglu_fp8=lambda *operands: None)  # as if a product of SwiGLU stored FP8
    with patch.object(fp8_linear.Fp8Gated, "storing_fp8", lambda self, num_tokens: stored):
        compile_ahead(in_fp8, [16, MAX_TOKENS])
    module.fetches_early = lambda m, keys: True  # as if a product of skinny_gemm were among them
    compile_ahead(model, [16])


def compile_windowed() -> None:
    """What only encoders with windows launch, in ModernBERT's shapes."""
    for num_tokens in (16, 512, MAX_TOKENS):
        heads = torch.zeros(num_tokens, 12, 64, dtype=torch.bfloat16)
        wide = torch.zeros(num_tokens, 2 * 1152, dtype=torch.bfloat16)
        order = early.early_for(num_tokens, fetches=False, device=CPU)
        with compiling(2), early.launching(order):
            rows.copy_real_rows(heads, torch.zeros(3, dtype=torch.int32), torch.zeros_like(heads))
            gated.gelu_mul(wide, wide[:, :1152].contiguous(), by_tanh=False)


def compile_flat() -> None:
    """Attention of our own in pplx-embed's and BGE-M3's shapes, whatever the policy chooses."""
    for num_tokens, num_seqs, heads in (
        (16, 1, (16, 8, 128)),
        (512, 16, (16, 8, 128)),
        (512, 1, (16, 16, 64)),
    ):
        spec = AttentionSpec(*heads, heads[2] ** -0.5, False, torch.bfloat16, CPU)
        qkv = torch.zeros(num_tokens, heads[0] + 2 * heads[1], heads[2], dtype=torch.bfloat16)
        out = torch.zeros(num_tokens, heads[0], heads[2], dtype=torch.bfloat16)
        cu_seqlens = torch.zeros(num_seqs + 1, dtype=torch.int32)
        table, attention = torch.zeros(64, heads[2]), FlatProductAttention(spec)
        layout = rope_layout.QkRope(*heads, 1e-6, torch.ones(2, heads[2], dtype=torch.bfloat16), table)
        for fetches in (False, True):
            with compiling(2), early.launching(early.early_for(num_tokens, fetches, device=CPU)):
                q, k, v = torch.split(qkv, [heads[0], heads[1], heads[1]], dim=1)
                attention.forward(q, k, v, out, cu_seqlens, num_tokens)
                attention.forward_product(qkv.flatten(1), layout, out, cu_seqlens)


def compile_absorbed() -> None:
    """In the shapes of BGE-M3, bge-base and bge-small, of few tokens and of many, in every order."""
    cu_seqlens, query = torch.zeros(3, dtype=torch.int32), OneQuery("first", 0.125)
    shapes = (1024, 16), (768, 12), (384, 12)
    for num_tokens, (size, num_heads), order in itertools.product((1024, 8192), shapes, early.Early):
        hidden = torch.zeros(num_tokens, size, dtype=torch.bfloat16)
        heads = AbsorbedHeads(*hidden.new_zeros(3, size, size), *hidden.new_zeros(2, size), num_heads)
        scratch = hidden.new_zeros(scratch_elements(num_tokens, 2, heads))
        out = PickedRows(*hidden.new_zeros(2, 2, size), scratch)
        with compiling(2), early.launching(order):
            absorbed_attention(hidden, cu_seqlens, heads, query, out)


def chosen(key: gemm.WeightKey) -> list[gemm.GemmChoice]:
    """What follows is in the same kernel, then in the next one, from partial sums; cuBLAS from 17 rows on."""
    fused = gemm.GemmPlan(1, 16, 64, 64, 4, 4, fused=key[2])
    return [gemm.GemmChoice(8, SPLIT if key[2] == "sum" else fused), gemm.GemmChoice(16, SPLIT)]


def load(
    module: ModuleType,
    config: ModelConfig,
    keys: Collection[gemm.WeightKey],
    weights: WeightSource = DummyWeights(),  # noqa: B008
) -> Model:
    """Its weights on the CPU, its activations as on a GPU."""
    if module is bert:
        with (
            patch.object(torch.Tensor, "is_cuda", True),
            patch.object(linear, "_prepack", lambda weight: None),
        ):
            model = bert.BertModel(config, weights, torch.bfloat16, CPU, MAX_TOKENS)
        model._on_cpu = False
        buffers = encoder.EncoderBuffers.allocate(config, MAX_TOKENS, torch.bfloat16, CPU)
        scratch = torch.zeros(SCRATCH_ROWS, config.head_dim + SCRATCH_TAIL)
        model._buffers = replace(buffers, scratch=scratch)
        return model
    model = qwen3.Qwen3Model(config, weights, torch.bfloat16, CPU, MAX_TOKENS)
    model._workspace._partial_elements = max(map(gemm.partial_elements, keys), default=0)
    return model


def kernels() -> list[tuple[str, JITFunction]]:
    def own(module: ModuleType) -> list[tuple[str, JITFunction]]:
        return [(name, value) for name, value in vars(module).items() if isinstance(value, JITFunction)]

    return [found for module in MODULES for found in own(module)]


def variants(kernel: JITFunction) -> list[tuple[int, int, str]]:
    compiled = kernel.device_caches[0][0].values()
    return [accesses(variant.asm["ptx"]) for variant in compiled]


def accesses(ptx: str) -> tuple[int, int, str]:
    found = re.findall(r"(?:ld|st)\.global\S*|cp\.async\.cg\S*", ptx)  # .cg copies 16 bytes
    wide = [name for name in found if ".v4.b32" in name or name.startswith("cp")]
    narrow = [name for name in found if re.search(r"\.(b|u|s)(8|16)\b", name)]
    return len(wide), len(narrow), " ".join(re.findall(r"griddepcontrol\.(\w+)", ptx))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
