"""Every alias at full size in bf16 against fp32, and what only the families with rotation have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.attention.backends import load_backends
from rose.attention.base import AttentionSpec
from rose.attention.reference import reference_attention, relative_error
from rose.attention.sdpa import SdpaAttention
from rose.config import load_config
from rose.device_batch import Outputs
from rose.heads.dense import dense_stages
from rose.models import bert, gemma3, modernbert, nomic_bert, qwen3
from rose.models.registry import build_model
from rose.reference import reference_vectors
from rose.weights import dummy_weights
from tests.gpu.loaded_model import CUDA, LoadedModel, least_cosine, nothing_waits

pytestmark = pytest.mark.gpu

PRESETS = Path(__file__).resolve().parents[2] / "rose" / "presets"
MAX_TOKENS = 1024
ROTARY = ["nomic-embed", "modernbert-embed", "embeddinggemma"]
# What tests/gpu/test_bert.py, test_qwen3.py and test_engine.py hold to the reference too, and the largest.
LONG = ["bge-base", "bge-large", "bge-m3", "pplx-embed", "pplx-embed-4b"]
ALIASES = [
    "minilm",
    "bge-small",
    "multilingual-e5-small",
    *ROTARY,
    "qwen3-embedding",
    *(pytest.param(alias, marks=pytest.mark.long) for alias in LONG),
]


@dataclass(frozen=True)
class Loaded(LoadedModel):
    """The same with what the reference says."""

    def expected(self, sequences: list[np.ndarray]) -> torch.Tensor:
        """f32[B, D] by the reference, Dense modules included."""
        config = self.model.config
        expected = reference_vectors(config, self.weights, sequences, device=CUDA.type)
        for dense in config.dense:
            shape = (dense.out_features, dense.in_features)
            weight = self.weights.tensor(f"{dense.folder}/linear.weight", shape).cpu()
            expected = expected @ weight.T
        return expected


def load(alias: str, dtype: torch.dtype = torch.bfloat16, ahead: bool = False, **changes: object) -> Loaded:
    """ahead: compile all variants of all kernels first: for a dozen models that is what takes minutes."""
    config = replace(load_config(PRESETS / alias), **changes)
    config = replace(config, windows=config.windows[: config.num_layers])
    weights = dummy_weights(config, 1, CUDA)
    with pytest.MonkeyPatch.context() as patched:
        for module in () if ahead else (bert, gemma3, modernbert, nomic_bert, qwen3):
            patched.setattr(module, "compile_ahead", lambda *arguments: None)
        model = build_model(config, weights, dtype, CUDA, MAX_TOKENS)
    backends = load_backends(model.attention_spec, compile_missing=False)
    return Loaded(model, weights, next(iter(backends.values())))


@pytest.fixture(autouse=True)
def freed_after_each() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def poison_freed_memory() -> None:
    """Memory that is allocated next and not written holds NaN: small and large blocks of the allocator."""
    torch.cuda.empty_cache()
    blocks = [torch.full((1 << 18,), float("nan"), dtype=torch.bfloat16, device=CUDA) for _ in range(16)]
    blocks += [torch.full((1 << 23,), float("nan"), dtype=torch.bfloat16, device=CUDA) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("alias", ALIASES)
def test_full_size_in_bf16_is_near_fp32(alias: str) -> None:
    """Alone, packed with others and padding, and past every window."""
    loaded = load(alias)
    longest = min(loaded.model.config.max_model_len, 600)
    sequences = loaded.sequences([5, 1, 77, longest, 130])
    expected = loaded.expected(sequences)
    poison_freed_memory()
    outputs = loaded.run(sequences, MAX_TOKENS, filler=777)
    assert least_cosine(outputs.vectors, expected) >= 0.999
    if outputs.int8 is not None:
        assert torch.equal(outputs.int8, torch.round(torch.tanh(outputs.vectors) * 127).to(torch.int8))
    alone = loaded.run(sequences[2:3], 80).vectors
    assert least_cosine(alone, expected[2:3]) >= 0.999


@pytest.mark.parametrize("alias", ROTARY)
def test_fp32_equals_the_reference(alias: str) -> None:
    """Layers of both kinds, by torch's own attention, in bands where there is a window."""
    loaded = load(alias, torch.float32, num_layers=7)
    sequences = loaded.sequences([5, 500, 100, 64])
    assert least_cosine(loaded.run(sequences, 700).vectors, loaded.expected(sequences)) >= 0.99999


@pytest.mark.parametrize(
    ("alias", "pooling", "bucket"),
    [
        ("nomic-embed", "mean", 64),
        ("nomic-embed", "max", 320),
        ("modernbert-embed", "cls", 64),
        ("modernbert-embed", "mean", 320),
        ("embeddinggemma", "weightedmean", 64),
        ("embeddinggemma", "mean", 320),
    ],
)
def test_replays_with_other_tokens_and_offsets(alias: str, pooling: str, bucket: int) -> None:
    """Captured once for `bucket` tokens and 4 sequences; then anything of that size, right each time.

    Kernels of 64 tokens are launched early, those of 320 are not.
    """
    loaded = load(alias, num_layers=7, pooling=pooling)
    batches = [(bucket, 0, 0), (3, 5, 7), (bucket // 2, bucket // 2, 0), (1, 1, 1)]
    for sequences, vectors in loaded.replayed(bucket, batches):
        assert least_cosine(vectors, loaded.expected(sequences)) >= 0.999


@pytest.mark.parametrize("alias", ROTARY)
def test_padding_changes_no_bit_and_nothing_waits(alias: str) -> None:
    loaded = load(alias, num_layers=7)
    sequences = loaded.sequences([29, 200, 3])
    poison_freed_memory()
    first = loaded.run(sequences, 256).vectors
    batch, outputs = loaded.batch(sequences, 256, filler=777), loaded.outputs(4)
    with nothing_waits(), torch.inference_mode():
        loaded.model.forward(batch, outputs)
    assert torch.isfinite(first).all()
    assert torch.equal(outputs.vectors[:-1], first)


@pytest.mark.parametrize("alias", ROTARY)
def test_every_kernel_is_compiled_while_a_model_loads(alias: str) -> None:
    loaded = load(alias, ahead=True, num_layers=2)
    before = compiled_variants()
    for num_tokens in (1, 80, 300, MAX_TOKENS):
        loaded.run(loaded.sequences([num_tokens]), num_tokens)
    assert before > 0
    assert compiled_variants() == before


def compiled_variants() -> int:
    """Of all kernels here, on this device."""
    from triton.runtime.jit import JITFunction

    from rose.kernels.jit import activation, embedding, gated, norm, pooling, rope, rows

    modules = (activation, embedding, gated, norm, pooling, rope, rows)
    kernels = [
        value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    ]
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in {*kernels})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(12, 12, 64), (3, 1, 256)], ids=["modernbert", "gemma3"])
def test_windows(heads: tuple[int, int, int], dtype: torch.dtype, window: int, causal: bool) -> None:
    """torch's ragged kernel and the bands, over lengths at and around the window's edges, and padding."""
    spec = AttentionSpec(*heads, heads[2] ** -0.5, causal, dtype, CUDA, window)
    lengths = [1, 63, 64, 65, 66, 0, 700, 256, 257, 258]
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    counts = [heads[0], heads[1], heads[1]]
    generator = torch.Generator(CUDA).manual_seed(window)
    shape = (int(offsets[-1]) + 5, sum(counts), heads[2])
    q, k, v = torch.randn(shape, dtype=dtype, device=CUDA, generator=generator).split(counts, 1)
    out = torch.zeros(shape[0], heads[0], heads[2], dtype=dtype, device=CUDA)
    attention = SdpaAttention(spec)
    attention.plan(offsets)
    attention.forward(q, k, v, out, torch.from_numpy(offsets).to(CUDA), 700)
    expected = reference_attention(q, k, v, offsets.tolist(), spec)
    total = int(offsets[-1])
    assert relative_error(out[:total], expected[:total]) < (0.006 if dtype == torch.bfloat16 else 1e-4)


def test_dense_stages_of_embeddinggemma_are_exact() -> None:
    """Also for batches of more sequences than the buffers have rows."""
    config = load_config(PRESETS / "embeddinggemma")
    weights = dummy_weights(config, 1, CUDA)
    stages = dense_stages(config, weights, CUDA)
    for count in (1, 512, 700):
        outputs = Outputs(torch.empty(count, config.dimensions, device=CUDA))
        pooled = stages.pooled(outputs)
        pooled.vectors.normal_()
        expected = pooled.vectors.double()
        for dense in config.dense:
            shape = (dense.out_features, dense.in_features)
            expected = expected @ weights.tensor(f"{dense.folder}/linear.weight", shape).double().T
        stages(pooled, outputs)
        torch.testing.assert_close(outputs.vectors.double(), expected, rtol=1e-4, atol=1e-4)
