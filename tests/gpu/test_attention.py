"""Every attention backend at hand, against fp32: odd lengths, strided views, graphs, batches in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rose.attention import tune
from rose.attention.backends import load_backends
from rose.attention.base import AttentionSpec, Fp8Attention, ProductAttention, begin, input_dtype
from rose.attention.policy import load_table
from rose.attention.reference import reference_attention, relative_error
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend

pytestmark = pytest.mark.gpu

NAMES = (
    *("fa4", "fa4-64x128-early", "flashinfer-fa3", "flashinfer-fa3-fp8", "flashinfer-fa2"),
    *("chained", "flat", "flat-product", "sdpa"),
)
HEADS = {
    "hd128": (16, 8, 128),
    "hd128-3": (12, 4, 128),
    "hd128-4b": (32, 8, 128),
    "hd64-2": (8, 4, 64),
    "hd64": (16, 16, 64),
    "hd32": (12, 12, 32),
}
LENGTHS = {
    "1": [1],
    "17": [17],
    "128": [128],
    "512": [512],
    "1+511": [1, 511],
    "with empty": [100, 0, 77, 300],
    "16x30": [30] * 16,
    "1..64": list(range(1, 65)),
    "empty first and last": [0, 0, 5, 190, 0],
    "129x3": [129] * 3,
    "300 tiny": [1 + i % 7 for i in range(300)],
    "512 tiny": [1 + i % 3 for i in range(512)],
    "mixed": [2049, 3, 640, 191, 192, 193],
    "4096": [4096],
    "8192": [8192],
    # Chained attention splits the last works of these for some or all of HEADS, of the last one for none.
    "200": [200],
    "300": [300],
    "512 among empty": [0, 512, 0],
    "512+400+300": [512, 400, 300],
    "129x35": [129] * 35,
    "300x23": [300] * 23,
    "512x5": [512] * 5,
    "512x25": [512] * 25,
    "512x25+1": [*[512] * 25, 1],
}
MAX_ERROR = 0.006  # bf16 products and output: 0.0022 measured
# Weights of values in e4m3; q, k and v are what they were rounded to.
FP8_MAX_ERROR = 0.04


def most_error(backend: AttentionBackend) -> float:
    return FP8_MAX_ERROR if isinstance(backend, Fp8Attention) else MAX_ERROR


@lru_cache
def backends_of(heads: str, causal: bool) -> tuple[AttentionSpec, dict[str, AttentionBackend]]:
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    device = torch.device("cuda", 0)
    spec = AttentionSpec(
        num_heads, num_kv_heads, head_dim, head_dim**-0.5, causal, torch.bfloat16, device, fp8=True
    )  # fmt: skip
    return spec, load_backends(spec)


def pick(name: str, heads: str, causal: bool = False) -> tuple[AttentionSpec, AttentionBackend]:
    spec, found = backends_of(heads, causal)
    if name not in found:
        pytest.skip(f"{name} is not available for {heads}, causal={causal}")
    return spec, found[name]


@dataclass
class Buffers:
    """Static buffers of one (tokens, sequences) configuration, as a graph's."""

    spec: AttentionSpec
    num_tokens: int
    num_seqs: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        spec = self.spec
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        generator = torch.Generator(spec.device).manual_seed(self.num_tokens)
        shape = (self.num_tokens, sum(heads) * spec.head_dim)
        qkv = torch.randn(shape, dtype=spec.dtype, device=spec.device, generator=generator)
        self.qkv = qkv.to(self.dtype)
        self.q, self.k, self.v = torch.split(self.qkv.view(-1, sum(heads), spec.head_dim), heads, dim=1)
        self.out = torch.empty(
            self.num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device
        )
        self.cu_seqlens = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=spec.device)

    def offsets(self, lengths: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[S+1]: the lengths, then empty sequences."""
        padded = [*lengths, *[0] * (self.num_seqs - len(lengths))]
        return np.cumsum([0, *padded], dtype=np.int32)

    def forward(self, backend: AttentionBackend, max_seqlen: int) -> None:
        begin(backend, self.cu_seqlens, self.num_tokens)
        backend.forward(self.q, self.k, self.v, self.out, self.cu_seqlens, max_seqlen)

    def error(self, offsets: np.ndarray[Any, np.dtype[np.int32]], out: torch.Tensor | None = None) -> float:
        """Relative error of the real rows; NaN if any of them was not written."""
        total = int(offsets[-1])
        exact = (x.to(self.spec.dtype) for x in (self.q, self.k, self.v))
        expected = reference_attention(*exact, offsets.tolist(), self.spec)
        return relative_error((self.out if out is None else out)[:total], expected[:total])


def eager_error(spec: AttentionSpec, backend: AttentionBackend, lengths: list[int], padding: int) -> float:
    buffers = Buffers(spec, sum(lengths) + padding, len(lengths), input_dtype(backend, spec))
    assert buffers.q.stride(0) == (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    if padding:
        largest = min(1e4, torch.finfo(buffers.dtype).max)
        large = torch.full_like(buffers.qkv[-padding:], largest, dtype=spec.dtype)
        buffers.qkv[-padding:] = large.to(buffers.dtype)  # whatever an earlier batch may have left there
    offsets = buffers.offsets(lengths)
    buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
    buffers.out.fill_(float("nan"))
    backend.plan(offsets)
    buffers.forward(backend, max(lengths))
    return buffers.error(offsets)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_every_length(name: str, heads: str, causal: bool, lengths: str) -> None:
    spec, backend = pick(name, heads, causal)
    assert eager_error(spec, backend, LENGTHS[lengths], padding=0) < most_error(backend)


@pytest.mark.parametrize("lengths", [[100, 0, 77, 300], [200], [0, 300]], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_do_not_matter(name: str, heads: str, lengths: list[int]) -> None:
    spec, backend = pick(name, heads)
    assert eager_error(spec, backend, lengths, padding=35) < most_error(backend)


@pytest.mark.parametrize("lengths", [[700, 300, 1100, 5], [1100], [500]], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_that_grow_and_fall(name: str, heads: str, causal: bool, lengths: list[int]) -> None:
    """The greatest weight of a query moves from tile to tile of its keys, by far more than one of noise."""
    spec, backend = pick(name, heads, causal)
    buffers = Buffers(spec, sum(lengths), len(lengths), input_dtype(backend, spec))
    growth = torch.tensor([1.0, 6.0, 3.0, 12.0, 2.0, 24.0, 1.0, 40.0, 8.0], device=spec.device)
    for start, length in zip(buffers.offsets(lengths), lengths, strict=False):
        tiles = torch.arange(length, device=spec.device) // 128
        keys = buffers.k[start : start + length]
        keys.copy_(keys.float() * growth[tiles][:, None, None])
    offsets = buffers.offsets(lengths)
    buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
    backend.plan(offsets)
    buffers.forward(backend, max(lengths))
    assert buffers.error(offsets) < 2 * most_error(backend)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_short_sequences_are_the_same_alone_and_packed(name: str, heads: str) -> None:
    spec, backend = pick(name, heads)
    packed = Buffers(spec, 512, 16, input_dtype(backend, spec))
    offsets = packed.offsets([30] * 16)
    packed.cu_seqlens.copy_(torch.from_numpy(offsets))
    backend.plan(offsets)
    packed.forward(backend, 30)
    alone = Buffers(spec, 64, 1, input_dtype(backend, spec))
    alone.qkv[:30] = packed.qkv[210:240]
    offsets = alone.offsets([30])
    alone.cu_seqlens.copy_(torch.from_numpy(offsets))
    backend.plan(offsets)
    alone.forward(backend, 30)
    assert relative_error(alone.out[:30], packed.out[210:240].float()) < most_error(backend)


def captured(backend: AttentionBackend, buffers: Buffers, lengths: list[int]) -> torch.cuda.CUDAGraph:
    """A graph of one forward, captured as the engine does, with the list of work that its kernels share."""
    offsets = buffers.offsets(lengths)
    buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
    backend.plan(offsets)
    buffers.forward(backend, buffers.num_tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.forward(backend, buffers.num_tokens)
    return graph


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_serves_any_lengths(name: str, heads: str, causal: bool) -> None:
    spec, backend = pick(name, heads, causal)
    if not backend.capturable:
        pytest.skip(f"{name} is not for capture")
    buffers = Buffers(spec, 512, 16, input_dtype(backend, spec))
    graph = captured(backend, buffers, [17, 3])
    for lengths in ([512], [1, 511], [100, 0, 77, 300], [30] * 16, [1], [32] * 16, [0, 500], [512]):
        offsets = buffers.offsets(lengths)
        buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
        buffers.out.fill_(float("nan"))
        backend.plan(offsets)
        graph.replay()
        assert buffers.error(offsets) < most_error(backend), lengths


@pytest.mark.parametrize("heads", ["hd128", "hd64"])
@pytest.mark.parametrize("name", NAMES)
def test_two_configurations_share_a_backend(name: str, heads: str) -> None:
    """Replays of one (tokens, sequences) configuration between those of another leave both right."""
    spec, backend = pick(name, heads)
    if not backend.capturable:
        pytest.skip(f"{name} is not for capture")
    dtype = input_dtype(backend, spec)
    small, large = Buffers(spec, 128, 4, dtype), Buffers(spec, 2048, 64, dtype)
    graphs = [captured(backend, small, [9]), captured(backend, large, [2000])]
    for lengths in ([[128], [32] * 64], [[1, 2, 3], [2048]], [[64, 64], [1, 2000, 40]]):
        for buffers, graph, mine in zip((small, large), graphs, lengths, strict=True):
            offsets = buffers.offsets(mine)
            buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
            buffers.out.fill_(float("nan"))
            backend.plan(offsets)
            graph.replay()
            assert buffers.error(offsets) < most_error(backend), mine


@pytest.mark.parametrize("heads", ["hd128", "hd64"])
@pytest.mark.parametrize("name", NAMES)
def test_two_batches_in_flight_do_not_mix(name: str, heads: str) -> None:
    """The second batch is planned while the first one's copy still waits behind a sleeping kernel."""
    spec, backend = pick(name, heads)
    if not backend.capturable:
        pytest.skip(f"{name} is not for capture")
    buffers = Buffers(spec, 512, 8, input_dtype(backend, spec))
    graph = captured(backend, buffers, [512])
    staged = [torch.empty(9, dtype=torch.int32, pin_memory=True) for _ in range(2)]
    for pair in ([[512], [1] * 8], [[100, 0, 77], [511, 1]], [[64] * 8, [3, 400, 20]]):
        planned, results = [], []
        torch.cuda._sleep(40_000_000)  # about 20 ms
        for slot, lengths in enumerate(pair):
            offsets = buffers.offsets(lengths)
            staged[slot].copy_(torch.from_numpy(offsets))
            buffers.cu_seqlens.copy_(staged[slot], non_blocking=True)
            backend.plan(offsets)
            buffers.out.fill_(float("nan"))
            graph.replay()
            results.append(buffers.out.clone())
            planned.append(offsets)
        torch.cuda.synchronize()
        for offsets, result in zip(planned, results, strict=True):
            assert buffers.error(offsets, result) < most_error(backend), pair


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES[:6])
def test_a_forward_allocates_nothing(name: str, heads: str) -> None:
    spec, backend = pick(name, heads)
    buffers = Buffers(spec, 1024, 512, input_dtype(backend, spec))
    offsets = buffers.offsets([2] * 512)
    buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
    backend.plan(offsets)
    buffers.forward(backend, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        backend.plan(offsets)
        buffers.forward(backend, 2)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# Tokens and sequences of a graph, which between them take every plan, and batches that it may serve.
PRODUCTS: dict[tuple[int, int], list[list[int]]] = {
    (512, 16): [[512], [1, 511], [100, 0, 77, 300], [30] * 16, [1], [0, 500]],
    (512, 4): [[512], [1, 511], [128] * 4],
    (128, 4): [[128], [1, 127], [32] * 4, [0, 50, 0, 33]],
    (128, 1): [[128], [1], [65]],
    (32, 1): [[32], [1], [17]],
}


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("graph", PRODUCTS, ids=lambda graph: f"{graph[0]}in{graph[1]}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", ["hd128", "hd128-4b", "hd64"])
def test_attention_straight_from_the_product(
    heads: str, causal: bool, graph: tuple[int, int], splits: int
) -> None:
    """What the kernel that norms and rotates, then fp32 attention, make of it; padded rows are NaN."""
    spec, backend = pick("flat-product", heads, causal)
    assert isinstance(backend, ProductAttention)
    device, dim = spec.device, spec.head_dim
    weight = 1 + 0.2 * torch.randn(2, dim, device=device)
    table = rope_table(dim, 1e6, 1024, device)
    rope = QkRope(spec.num_heads, spec.num_kv_heads, dim, 1e-6, weight.bfloat16(), table)
    num_tokens, num_seqs = graph
    buffers = Buffers(spec, num_tokens, num_seqs)
    product = torch.randn(splits, *buffers.qkv.shape, device=device).bfloat16()
    for lengths in PRODUCTS[graph]:
        offsets = buffers.offsets(lengths)
        buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
        places = [place for length in lengths for place in range(length)]
        positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        positions[: len(places)] = torch.tensor(places, device=device)
        padded = product.clone()
        padded[:, len(places) :] = float("nan")
        qk_norm_rope(product, positions, rope, buffers.qkv)
        buffers.out.fill_(float("nan"))
        backend.forward_product(padded, rope, buffers.out, buffers.cu_seqlens)
        assert buffers.error(offsets) < most_error(backend), lengths


@pytest.mark.parametrize("lengths", ["512", "1+511", "with empty", "300 tiny", "mixed", "4096"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", ["hd128", "hd128-4b"])
def test_attention_in_fp8_of_a_product(heads: str, causal: bool, lengths: str) -> None:
    """Norm, rotation, rounding to e4m3 and attention, to fp32; heads differ in size by a thousand."""
    spec, backend = pick("flashinfer-fa3-fp8", heads, causal)
    assert isinstance(backend, Fp8Attention)
    counts, dim = (spec.num_heads, spec.num_kv_heads), spec.head_dim
    weight = 1 + 0.2 * torch.randn(2, dim, device=spec.device)
    rope = QkRope(*counts, dim, 1e-6, weight.bfloat16(), rope_table(dim, 1e6, 4096, spec.device))
    num_tokens = sum(LENGTHS[lengths])
    buffers = Buffers(spec, num_tokens, len(LENGTHS[lengths]))
    sizes = torch.logspace(-1.5, 1.5, counts[1], device=spec.device)
    buffers.v.mul_(sizes[:, None].bfloat16())
    places = torch.cat([torch.arange(length) for length in LENGTHS[lengths]]).int().to(spec.device)
    bounds = [dim**0.5 * float(x) * torch.ones(n) for x, n in zip(weight.abs().amax(1), counts, strict=True)]
    scales = torch.cat([torch.cat(bounds).to(spec.device), 32 * sizes]) / 448
    packed = torch.empty_like(buffers.qkv, dtype=torch.float8_e4m3fn)
    qk_norm_rope(buffers.qkv, places, rope, packed, scales)
    offsets = buffers.offsets(LENGTHS[lengths])
    buffers.cu_seqlens.copy_(torch.from_numpy(offsets))
    begin(backend, buffers.cu_seqlens, num_tokens)
    buffers.out.fill_(float("nan"))
    backend.forward_fp8(packed.view(num_tokens, -1, dim), scales, buffers.out, buffers.cu_seqlens)
    qk_norm_rope(buffers.qkv, places, rope, buffers.qkv)
    exact = reference_attention(buffers.q, buffers.k, buffers.v, offsets.tolist(), spec)
    repeated = sizes.repeat_interleave(counts[0] // counts[1])[:, None]
    error = relative_error(buffers.out / repeated, exact / repeated)
    print(f"{heads} {'causal' if causal else 'full'} {lengths}: relative error {error:.4f}")
    assert error < 0.06


def test_the_tuner_writes_a_table_that_the_policy_reads(tmp_path: Path) -> None:
    out = tmp_path / "policy.json"
    assert tune.main(["--shape", "1x128", "--shape", "4x100", "--head-dim", "64", "--out", str(out)]) == 0
    table = load_table(out)
    assert [(cell.num_tokens, cell.num_seqs) for cell in table.cells] == [(128, 1), (400, 4)]
    assert all(us > 0 for cell in table.cells for _, us in cell.us)
