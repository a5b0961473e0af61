"""The same tensors from every kind of file, and one line that names what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.errors import ModelLoadError
from rose.weights import DummyWeights, MappedWeights, open_weights
from tests.forbidden import forbid

TENSORS = {
    "bert.embeddings.LayerNorm.gamma": torch.arange(4.0),
    "bert.embeddings.LayerNorm.beta": torch.arange(4.0) + 10,
    "bert.encoder.layer.0.attention.self.query.weight": torch.arange(12.0).reshape(3, 4),
    "plain.weight": torch.arange(6, dtype=torch.float16),
    "model.norm.weight": torch.arange(5, dtype=torch.bfloat16),
}


def _safetensors(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def _pickled(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")


def _legacy_pickled(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _sharded(
    folder: Path, prefix: str, suffix: str, save: Callable[[dict[str, torch.Tensor], Path], None]
) -> None:
    weight_map = {}
    for index, name in enumerate(TENSORS):
        shard = f"{prefix}-{index % 2 + 1:05}-of-00002.{suffix}"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        save({name: TENSORS[name] for name, owner in weight_map.items() if owner == shard}, folder / shard)
    index_file = folder / f"{prefix}.{suffix}.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _sharded_safetensors(folder: Path) -> None:
    _sharded(folder, "model", "safetensors", save_file)


def _sharded_pickled(folder: Path) -> None:
    _sharded(folder, "pytorch_model", "bin", torch.save)


WRITERS = [_safetensors, _pickled, _legacy_pickled, _sharded_safetensors, _sharded_pickled]


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ModelLoadError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_tensors(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    weights = open_weights(tmp_path)
    for stored, tensor in TENSORS.items():
        read = weights.tensor(stored, tuple(tensor.shape))
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_prefixes_and_old_norm_names_are_seen_through(tmp_path: Path) -> None:
    _safetensors(tmp_path)
    weights = open_weights(tmp_path)
    assert weights.tensor("embeddings.LayerNorm.weight", (4,))[1] == 1.0
    assert weights.tensor("embeddings.LayerNorm.bias", (4,))[1] == 11.0
    assert weights.tensor("encoder.layer.0.attention.self.query.weight", (3, 4))[2, 3] == 11.0
    assert weights.tensor("norm.weight", (5,)).dtype == torch.bfloat16


def test_the_bare_name_wins_over_a_prefixed_one() -> None:
    weights = MappedWeights({"model.norm.weight": torch.zeros(2), "norm.weight": torch.ones(2)}, "memory")
    assert weights.tensor("norm.weight", (2,)).sum() == 2


@pytest.mark.parametrize("write", WRITERS)
def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    weights = open_weights(tmp_path)
    missing = _refusal(lambda: weights.tensor("encoder.layer.7.output.dense.weight", (4, 4)))
    assert "encoder.layer.7.output.dense.weight" in missing and str(tmp_path) in missing
    wrong = _refusal(lambda: weights.tensor("plain.weight", (2, 3)))
    assert "plain.weight" in wrong and "[6]" in wrong and "[2, 3]" in wrong and str(tmp_path) in wrong


def test_safetensors_come_before_a_pickle(tmp_path: Path) -> None:
    _safetensors(tmp_path)
    torch.save({"plain.weight": torch.zeros(6)}, tmp_path / "pytorch_model.bin")
    assert open_weights(tmp_path).tensor("plain.weight", (6,)).sum() == 15


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    message = _refusal(lambda: open_weights(tmp_path))
    assert str(tmp_path) in message and "model.safetensors" in message and "--load-format dummy" in message


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    assert "model.safetensors" in _refusal(lambda: open_weights(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    for content in (b"", b"not a pickle", pickle.dumps([1, 2], protocol=2)):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        assert "pytorch_model.bin" in _refusal(lambda: open_weights(tmp_path))
    torch.save(torch.zeros(3), tmp_path / "pytorch_model.bin")
    assert "not a dictionary" in _refusal(lambda: open_weights(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    )
    assert "model-00001-of-00001.safetensors" in _refusal(lambda: open_weights(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "index.json" in _refusal(lambda: open_weights(tmp_path))


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("shard", [None, 3, ["a"], "\0", "sub"])
def test_an_index_that_names_no_file_is_told(tmp_path: Path, kind: str, shard: object) -> None:
    (tmp_path / "sub").mkdir()
    index = tmp_path / f"{kind}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    refusal = _refusal(lambda: open_weights(tmp_path))
    assert str(tmp_path / shard if isinstance(shard, str) else index) in refusal
    assert isinstance(shard, str) or repr(shard) in refusal


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": []}'])
def test_an_index_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in _refusal(lambda: open_weights(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_may_not_be_read_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Root may read them all, so a call that opens them refuses."""
    torch.save({"a": torch.zeros(1)}, tmp_path / name)

    def forbidden(path: object, *_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    assert f"{name} cannot be read: [Errno 13] Permission denied" in _refusal(lambda: open_weights(tmp_path))


def test_a_module_out_of_reach_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _safetensors(tmp_path)
    weights = open_weights(tmp_path)
    forbid(monkeypatch, tmp_path / "2_Dense")
    refusal = _refusal(lambda: weights.tensor("2_Dense/linear.weight", (2, 2)))
    assert refusal.startswith(f"{tmp_path / '2_Dense'} cannot be read: [Errno 13]")


def test_a_pickle_of_more_than_tensors_by_name_is_told(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS | {3: torch.zeros(1)}, file)
    assert _refusal(lambda: open_weights(tmp_path)) == f"{file}: has the key 3, which is no tensor's name"
    torch.save(TENSORS | {"epoch": 7, "bias": [1.0]}, file)
    weights = open_weights(tmp_path)
    weights.root.check_layers(1)
    assert weights.tensor("plain.weight", (6,)).sum() == 15  # what no model reads is passed over
    assert _refusal(lambda: weights.tensor("bias", (1,))) == f"{tmp_path}: 'bias' is list, not a tensor"


def test_a_dtype_that_torch_has_not_is_told(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    refusal = _refusal(lambda: open_weights(tmp_path).tensor("a", (8,)))
    assert str(tmp_path) in refusal and "'a'" in refusal and "F6_E2M3" in refusal


class _Exploit:
    """Unpickled without weights_only, it would leave a file behind."""

    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._victim),)


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    victim = tmp_path / "owned"
    torch.save({"plain.weight": torch.zeros(6), "payload": _Exploit(victim)}, tmp_path / "pytorch_model.bin")
    refusal = _refusal(lambda: open_weights(tmp_path))
    assert refusal.endswith(
        "pytorch_model.bin cannot be read: it holds more than tensors, and nothing else is run"
    )
    assert not victim.exists()


@pytest.mark.parametrize("write", [_pickled, _legacy_pickled, _sharded_pickled])
def test_pickles_are_not_read_where_they_are_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    save_file({"lora.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")  # no model's
    refusal = _refusal(lambda: open_weights(tmp_path, pickles=False))
    assert re.search(
        rf"{tmp_path}/pytorch_model\S*\.bin is a pickle, which --load-format safetensors", refusal
    )


@pytest.mark.parametrize("file", ["2_Dense/pytorch_model.bin", "sparse_linear.pt"])
def test_pickles_beside_safetensors_are_refused_too(tmp_path: Path, file: str) -> None:
    (tmp_path / "2_Dense").mkdir()
    _safetensors(tmp_path)
    torch.save({"weight": torch.ones(2)}, tmp_path / file)
    name = file.replace("pytorch_model.bin", "weight").replace(".pt", ".pt/weight")
    assert open_weights(tmp_path).tensor(name, (2,)).sum() == 2
    weights = open_weights(tmp_path, pickles=False)
    assert weights.tensor("plain.weight", (6,)).sum() == 15
    refusal = _refusal(lambda: weights.tensor(name, (2,)))
    assert refusal.startswith(f"{tmp_path / file} is a pickle, which --load-format safetensors refuses")


def test_an_engine_reads_no_pickles_where_they_are_refused(minilm_folder: Path, tmp_path: Path) -> None:
    shutil.copy(minilm_folder / "config.json", tmp_path)
    torch.save(load_file(minilm_folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    options = EngineOptions(device="cpu", num_threads=1)
    refusal = _refusal(lambda: load_engine(tmp_path, options, dummy=False, model_name="m", pickles=False))
    assert "pytorch_model.bin is a pickle" in refusal
    load_engine(tmp_path, options, dummy=False, model_name="m").close()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("file", ["model.safetensors", "2_Dense/model.safetensors"])
def test_numbers_of_one_byte_need_a_config_that_scales_them(
    tmp_path: Path, dtype: torch.dtype, file: str
) -> None:
    (tmp_path / "2_Dense").mkdir()
    _safetensors(tmp_path)
    save_file({"dense.weight": torch.ones(2, 3).to(dtype)}, tmp_path / file)
    name = file.replace("model.safetensors", "dense.weight")
    refusal = _refusal(lambda: open_weights(tmp_path).tensor(name, (2, 3)))
    assert all(word in refusal for word in (repr(name), str(dtype), "quantization_config", str(tmp_path)))
    scaled = open_weights(tmp_path, fp8=True)
    if dtype is torch.float8_e4m3fn:
        assert scaled.tensor(name, (2, 3)).dtype is dtype
    else:
        assert "only torch.float8_e4m3fn is supported" in _refusal(lambda: scaled.tensor(name, (2, 3)))


@pytest.mark.parametrize("dtype", ["auto", "float32", "fp8"])
def test_fp8_weights_whose_config_does_not_say_so_start_no_engine(
    minilm_folder: Path, tmp_path: Path, dtype: str
) -> None:
    """ModelOpt says it in hf_quant_config.json, which nothing here reads."""
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("attention.self.query.weight"))
    scale = tensors[name].abs().amax(1, keepdim=True) / 448
    stored = {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors | stored, folder / "model.safetensors")
    options = EngineOptions(device="cpu", dtype=dtype)
    refusal = _refusal(lambda: load_engine(folder, options, dummy=False, model_name="m"))
    assert "attention.self.query.weight" in refusal and "quantization_config" in refusal


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_in_place_of_a_large_file_is_told(tmp_path: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n"
    (tmp_path / name).write_text(pointer)
    assert "git lfs pull" in _refusal(lambda: open_weights(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_are_mapped_not_copied(tmp_path: Path, name: str) -> None:
    def anonymous_kb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    big = {"big": torch.ones(8 << 20)}
    if name.endswith("bin"):
        torch.save(big, tmp_path / name)
    else:
        save_file(big, tmp_path / name)
    del big
    before = anonymous_kb()
    tensor = open_weights(tmp_path).tensor("big", (8 << 20,))
    assert tensor.sum() == 8 << 20
    assert anonymous_kb() - before < 16 << 10


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory to reset")
def test_a_load_takes_little_more_memory_than_the_model(minilm_folder: Path) -> None:
    """The mapped pages and the tensors made of them come to less than one and a half models at any moment."""

    def peak_kb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    model_kb = (minilm_folder / "model.safetensors").stat().st_size >> 10
    options = EngineOptions(device="cpu", num_threads=1, max_model_len=64, max_batch_tokens=64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before_kb = peak_kb()
    load_engine(minilm_folder, options, dummy=False, model_name="minilm").close()
    assert peak_kb() - before_kb < 1.5 * model_kb


def test_dummy_weights_depend_on_seed_name_and_shape_alone() -> None:
    first, second = DummyWeights(3), DummyWeights(3)
    names = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight"]
    forwards = {name: first.tensor(name, (5, 7)) for name in names}
    backwards = {name: second.tensor(name, (5, 7)) for name in reversed(names)}
    for name in names:
        assert torch.equal(forwards[name], backwards[name])
    assert not torch.equal(forwards[names[0]], forwards[names[1]])
    assert not torch.equal(forwards[names[0]], DummyWeights(4).tensor(names[0], (5, 7)))


def test_dummy_weights_have_the_scale_of_a_fresh_model() -> None:
    weights = DummyWeights(0)
    matrix = weights.tensor("encoder.layer.0.output.dense.weight", (300, 200))
    assert abs(matrix.std().item() - 0.02) < 0.001 and abs(matrix.mean().item()) < 0.001
    for norm in (
        "norm.weight",
        "encoder.layer.0.output.LayerNorm.weight",
        "layers.1.self_attn.q_norm.weight",
    ):
        assert torch.equal(weights.tensor(norm, (9,)), torch.ones(9))
    for norm in ("layers.1.input_layernorm.weight", "layers.1.post_attention_layernorm.weight"):
        assert torch.equal(weights.tensor(norm, (9,)), torch.ones(9))
