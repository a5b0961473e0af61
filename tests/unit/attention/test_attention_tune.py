"""The tuner's parts that need no GPU: the fp32 answer it checks against, and the table it writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.attention import tune
from rose.attention.backends import load_backends
from rose.attention.base import AttentionSpec, BatchShape
from rose.attention.policy import fastest, load_table
from rose.attention.reference import reference_attention, relative_error
from rose.attention.sdpa import SdpaAttention
from rose.kernels.rope import QkRope, qk_norm_rope
from tests.unit.attention.fp8_fake import Fp8Sdpa

SPEC = AttentionSpec(4, 2, 32, 0.2, False, torch.float32, torch.device("cpu"))
LENGTHS = (3, 0, 17, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_masked_dense_attention(causal: bool) -> None:
    """One dense attention over all tokens with a block-diagonal mask: shares no loop with the reference."""
    spec = dataclasses.replace(SPEC, causal=causal)
    offsets = np.cumsum([0, *LENGTHS])
    total = int(offsets[-1])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(total + 2, heads, 32, generator=generator) for heads in (4, 2, 2))
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    allowed = owner[:, None] == owner[None, :]
    if causal:
        allowed &= torch.ones(total, total, dtype=torch.bool).tril()
    wide_k, wide_v = (x[:total].repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[:total], wide_k) * spec.scale
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), wide_v)
    out = reference_attention(q, k, v, offsets.tolist(), spec)
    assert relative_error(out[:total], expected) < 1e-6
    assert out[total:].abs().max() == 0


class FromProduct(SdpaAttention):
    """Norms and rotates by itself; given q, k and v it would be wrong."""

    def __init__(self) -> None:
        super().__init__(SPEC)

    def forward_product(
        self, product: torch.Tensor, rope: QkRope, out: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        qkv = product.clone()
        positions = torch.arange(len(out), dtype=torch.int32) % 20
        qk_norm_rope(product, positions, rope, qkv)
        q, k, v = torch.split(qkv.view(len(out), -1, 32), [4, 2, 2], dim=1)
        super().forward(q, k, v, out, cu_seqlens, 20)


def test_torchs_own_backend_agrees_with_the_reference_on_strided_views() -> None:
    batch = tune.Batch(SPEC, 3, 20)
    assert not batch.q.is_contiguous()
    backend = load_backends(SPEC)["sdpa"]
    backend.plan(batch.host_cu_seqlens)
    batch.forward(backend)
    assert batch.error() < 1e-5


def test_where_layers_rotate_that_is_part_of_the_batch() -> None:
    """Whether it is a kernel of its own or the backend's part: in place, so only the first forward counts."""
    batch = tune.Batch(SPEC, 3, 20, qkv=(8 * 32, 64, "sum"))
    backend = load_backends(SPEC)["sdpa"]
    backend.plan(batch.host_cu_seqlens)
    for kind in (backend, FromProduct(), backend):
        batch.restart()
        batch.forward(kind)
        assert batch.error() < 1e-5
    batch.forward(backend)
    assert batch.error() > tune.MAX_ERROR


def test_heads_in_fp8_are_made_of_the_product_and_may_err_more() -> None:
    batch, backend = tune.Batch(SPEC, 3, 20, qkv=(8 * 32, 64, "sum")), Fp8Sdpa(SPEC)
    batch.restart()
    for _ in range(2):  # the product stays as it is
        batch.forward(backend)
        assert tune.MAX_ERROR < batch.error() < tune.FP8_MAX_ERROR
    assert backend.calls == 2
    assert tune.most_error("flashinfer-fa3-fp8") == tune.FP8_MAX_ERROR
    assert tune.most_error("flashinfer-fa3") == tune.MAX_ERROR
    assert [model.spec(SPEC.device).fp8 for model in tune.MODELS] == [True, True, False, False]


def test_a_wrong_result_shows_in_the_error_wherever_it_is() -> None:
    batch = tune.Batch(SPEC, 7, 5)
    backend = load_backends(SPEC)["sdpa"]
    backend.plan(batch.host_cu_seqlens)
    for row in (0, 34):
        batch.forward(backend)
        batch.out[row] += 1
        assert batch.error() > tune.MAX_ERROR


def test_what_is_written_is_what_the_policy_reads(tmp_path: Path) -> None:
    cell = {
        "head_dim": 64, "num_heads": 16, "num_kv_heads": 16, "causal": False,
        "num_tokens": 512, "num_seqs": 1,
        "us": {"fa4": 275.0, "sdpa": 353.0},
        "rel_error": {"fa4": 0.002},
    }  # fmt: skip
    table = {"format": 1, "device": "NVIDIA H200", "capability": [9, 0], "note": "x", "cells": [cell, cell]}
    tune.dump(table, tmp_path / "new" / "policy.json")
    read = load_table(tmp_path / "new" / "policy.json")
    assert (read.device, read.capability, len(read.cells)) == ("NVIDIA H200", (9, 0), 2)
    spec = AttentionSpec(16, 16, 64, 0.1, False, torch.bfloat16, torch.device("cpu"))
    assert fastest(read, spec, BatchShape(500, 1, 500), ["sdpa", "fa4"]) == "fa4"


@pytest.mark.parametrize(
    ("model", "length", "tried"),
    [
        (tune.PPLX_EMBED, 256, ["sdpa", "product"]),
        (tune.PPLX_EMBED, 257, ["sdpa"]),
        (tune.BGE_M3, 16, ["sdpa"]),
    ],
)
def test_attention_of_a_product_is_tried_where_there_is_one_and_sequences_are_short(
    model: tune.Model, length: int, tried: list[str]
) -> None:
    backends = {"sdpa": SdpaAttention(SPEC), "product": FromProduct()}
    assert list(tune.worth_trying(model, backends, length)) == tried


class Capturable(SdpaAttention):
    """As on a GPU."""

    capturable = True


def test_a_batch_a_line_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "load_backends", lambda spec, folders: {"sdpa": Capturable(spec)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tune, "time_forward", lambda backend, batch, layers: 100.0 * layers)
    arguments = tune.parse_arguments(["--shape", "1x16", "--shape", "3x5", "--head-dim", "32"])
    table, sound = tune.run(arguments, torch.device("cpu"))
    assert sound
    assert [(cell["num_tokens"], cell["num_seqs"], cell["us"]) for cell in table["cells"]] == [
        (16, 1, {"sdpa": 1200.0}),
        (15, 3, {"sdpa": 1200.0}),
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sdpa", "fastest"] in lines
    assert ["3x5", "1200.0", "sdpa"] in lines


def test_a_wrong_backend_shows_its_error_in_the_place_of_a_time() -> None:
    cell = {"us": {"sdpa": 90.0}, "rel_error": {"fa4": float("nan"), "sdpa": 0.002}}
    line = tune.report("1x16", cell, ["fa4", "flat-product", "sdpa"]).split()
    assert line == ["1x16", "error", "nan", "-", "90.0", "sdpa"]


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
