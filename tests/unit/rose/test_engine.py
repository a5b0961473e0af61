"""From a folder to an engine on the CPU: small models of both families, with seeded random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.batch import Engine, EngineInfo, Float32, RaggedBatch
from rose.config import load_config
from rose.engine import EngineOptions, _fp8, load_engine
from rose.errors import ModelLoadError, StepError
from rose.reference import reference_vectors
from rose.weights import dummy_weights

SMALL: Mapping[str, Mapping[str, object]] = {
    "bge-small": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 500,
        "max_position_embeddings": 96,
    },
    "pplx-embed": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 500,
    },
}
CPU = EngineOptions(device="cpu", num_threads=1, max_batch_seqs=64)

Loader = Callable[..., Engine]


@pytest.fixture
def small_folder(repo_root: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A preset, reduced to a size that takes milliseconds."""

    def make(alias: str) -> Path:
        folder = tmp_path / alias
        shutil.copytree(repo_root / "rose" / "presets" / alias, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | dict(SMALL[alias])))
        sentence = folder / "sentence_bert_config.json"
        if sentence.exists() and alias == "bge-small":
            sentence.write_text(json.dumps({"max_seq_length": 96, "do_lower_case": True}))
        return folder

    return make


@pytest.fixture
def load(small_folder: Callable[[str], Path]) -> Loader:
    def make(alias: str, options: EngineOptions = CPU) -> Engine:
        return load_engine(small_folder(alias), options, dummy=True, model_name=f"test/{alias}")

    return make


def sequences_of(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 500, length, dtype=np.int32) for length in lengths]


def cosines(a: Float32, b: Float32) -> Float32:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(axis=1) / norms, np.float32)


def test_info_says_what_the_folder_and_the_options_say(load: Loader) -> None:
    engine = load("pplx-embed", replace(CPU, max_model_len=100, max_batch_tokens=300))
    assert engine.info == EngineInfo(
        model="test/pplx-embed",
        architecture="qwen3",
        dtype="float32",
        device="cpu",
        dimensions=32,
        vocab_size=500,
        max_model_len=100,
        max_batch_tokens=300,
        max_batch_seqs=64,
        pooling="mean",
        normalize=False,
        has_int8=True,
        attention=("sdpa",),
        token_outputs={"hidden": 32},
    )
    engine.close()
    engine = load("bge-small")
    assert (engine.info.pooling, engine.info.normalize, engine.info.has_int8) == ("cls", True, False)
    assert engine.info.max_model_len == 96
    engine.close()


@pytest.mark.parametrize("alias", SMALL)
def test_vectors_are_the_references(
    load: Loader, small_folder: Callable[[str], Path], tmp_path: Path, alias: str
) -> None:
    engine = load(alias)
    sequences = sequences_of(1, 7, 64, 2, 96)
    result = engine.step(RaggedBatch.pack(sequences)).result()
    engine.close()
    config = load_config(tmp_path / alias)
    wanted = reference_vectors(config, dummy_weights(config, CPU.seed), sequences).numpy()
    assert cosines(result.vectors, wanted).min() > 0.9999
    if result.int8 is not None:
        assert np.abs(result.int8 - np.round(np.tanh(wanted) * 127)).max() <= 1


@pytest.mark.parametrize("alias", SMALL)
def test_alone_is_packed_in_any_order(load: Loader, alias: str) -> None:
    engine = load(alias)
    sequences = sequences_of(3, 90, 1, 17, 17, 50, 2, 33, seed=1)
    alone = np.concatenate([engine.step(RaggedBatch.pack([ids])).result().vectors for ids in sequences])
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(sequences))
        packed = engine.step(RaggedBatch.pack([sequences[row] for row in order])).result().vectors
        assert cosines(packed, alone[order]).min() > 0.9999
    engine.close()


def test_one_seed_gives_one_model(load: Loader, tmp_path: Path) -> None:
    batch = RaggedBatch.pack(sequences_of(5, 9))
    vectors = []
    for seed in (0, 0, 1):
        engine = load("pplx-embed", replace(CPU, seed=seed))
        shutil.rmtree(tmp_path / "pplx-embed")
        vectors.append(engine.step(batch).result().vectors)
        engine.close()
    assert (vectors[0] == vectors[1]).all()
    assert not np.allclose(vectors[0], vectors[2])


@pytest.mark.parametrize(
    ("options", "max_batch_tokens", "max_model_len"),
    [
        (EngineOptions(), 32_768, 32_768),
        (EngineOptions(max_model_len=512), 16_384, 512),
        (EngineOptions(max_batch_tokens=2048), 2048, 2048),
        (EngineOptions(max_batch_tokens=2048, max_model_len=1024), 2048, 1024),
    ],
)
def test_every_accepted_sequence_fits_into_a_step(
    load: Loader, options: EngineOptions, max_batch_tokens: int, max_model_len: int
) -> None:
    engine = load("pplx-embed", replace(options, device="cpu"))
    assert (engine.info.max_batch_tokens, engine.info.max_model_len) == (max_batch_tokens, max_model_len)
    with pytest.raises(StepError, match=f"this model takes {max_model_len}|a step takes {max_batch_tokens}"):
        engine.step(RaggedBatch.pack(sequences_of(max_model_len + 1)))
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(device="tpu"), "--device tpu: not a device"),
        (EngineOptions(device="meta"), "--device meta: only cpu and cuda"),
        (EngineOptions(device="cuda:99"), "--device cuda:99: no such CUDA device"),
        (EngineOptions(device="cpu", dtype="float16"), "overflows in float16; use bfloat16 or float32"),
        (EngineOptions(device="cpu", dtype="int4"), "--dtype int4: use auto, .*, fp8"),
        (EngineOptions(device="cpu", max_model_len=40_000), "40000: this model takes 32768"),
        (
            EngineOptions(device="cpu", max_model_len=512, max_batch_tokens=256),
            "512 exceeds --max-batch-tokens 256",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(load: Loader, options: EngineOptions, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load("pplx-embed", options)
    assert "\n" not in str(caught.value)


def test_too_little_memory_is_said_in_one_line(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nProcess 1 has 130 GiB.")

    monkeypatch.setattr("rose.engine.build_model", build_model)
    message = r"^test/pplx-embed cannot start on cpu: CUDA out of memory\. .* 9 GiB\.; .*--max-batch-tokens"
    with pytest.raises(ModelLoadError, match=message) as caught:
        load("pplx-embed")
    assert "\n" not in str(caught.value)


def _cpu_memory() -> None:
    torch.empty(1 << 60)


def _memory() -> None:
    raise MemoryError


def _busy() -> None:
    raise torch.AcceleratorError("CUDA error: devices are busy\nCUDA kernel errors might be ...")


def _full_disk() -> None:
    raise OSError(28, "No space left on device", "/root/.triton")


@pytest.mark.parametrize("step", ["_settled", "open_weights", "build_model", "load_backends", "CpuEngine"])
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (
            _cpu_memory,
            r"can't allocate memory: you tried to .*; a smaller --max-batch-tokens takes less memory",
        ),
        (_memory, "MemoryError; a smaller --max-batch-tokens takes less memory"),
        (_busy, "CUDA error: devices are busy"),
        (_full_disk, r"\[Errno 28\] No space left on device: '/root/\.triton'"),
    ],
)
def test_whatever_fails_at_start_is_said_in_one_line(
    small_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    fails: Callable[[], None],
    reason: str,
) -> None:
    monkeypatch.setattr(f"rose.engine.{step}", lambda *_, **__: fails())
    folder, dummy = small_folder("pplx-embed"), step != "open_weights"
    with pytest.raises(ModelLoadError, match=f"^m cannot start on cpu: {reason}$"):
        load_engine(folder, CPU, dummy=dummy, model_name="m")


def test_fp8_is_what_info_says_and_near_float32(load: Loader, tmp_path: Path) -> None:
    batch = RaggedBatch.pack(sequences_of(5, 9, 60))
    vectors = {}
    for dtype in ("float32", "fp8"):
        engine = load("pplx-embed", replace(CPU, dtype=dtype))
        shutil.rmtree(tmp_path / "pplx-embed")
        vectors[engine.info.dtype] = engine.step(batch).result().vectors
        engine.close()
    assert 0.99 < cosines(vectors["fp8"], vectors["float32"]).min() < 0.999999


def test_fp8_is_refused_to_families_that_lack_it(load: Loader, repo_root: Path) -> None:
    with pytest.raises(ModelLoadError, match="fp8: not for gemma3; for bert, llama, qwen2, qwen3"):
        folder = repo_root / "rose" / "presets" / "embeddinggemma"
        load_engine(folder, replace(CPU, dtype="fp8"), dummy=True, model_name="gemma")


@pytest.mark.parametrize(
    ("dtype", "stored", "capability", "fp8"),
    [
        ("auto", False, (9, 0), False),
        ("auto", True, (9, 0), True),
        ("auto", True, (8, 6), False),
        ("auto", True, None, False),
        ("bfloat16", True, (9, 0), False),
        ("fp8", False, (8, 9), True),
        ("fp8", False, None, True),
    ],
)
def test_fp8_is_never_the_default_of_plain_weights(
    dtype: str,
    stored: bool,
    capability: tuple[int, int] | None,
    fp8: bool,
    repo_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = replace(load_config(repo_root / "rose" / "presets" / "bge-m3"), fp8_weights=stored)
    assert _fp8(dtype, torch.device("cuda" if capability else "cpu"), config) == fp8


def test_fp8_is_refused_on_gpus_without_it(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = load_config(repo_root / "rose" / "presets" / "bge-m3")
    with pytest.raises(ModelLoadError, match=r"fp8: cuda:0 is of compute capability 8\.0; FP8 .* need 8\.9"):
        _fp8("fp8", torch.device("cuda:0"), config)


def test_bfloat16_runs_on_the_cpu_too(load: Loader, tmp_path: Path) -> None:
    batch = RaggedBatch.pack(sequences_of(5, 9))
    vectors = {}
    for dtype in ("float32", "bfloat16"):
        engine = load("bge-small", replace(CPU, dtype=dtype))
        shutil.rmtree(tmp_path / "bge-small")
        assert engine.info.dtype == dtype
        vectors[dtype] = engine.step(batch).result().vectors
        engine.close()
    assert 0.99 < cosines(vectors["float32"], vectors["bfloat16"]).min() < 0.999999
