"""python -m rose.convert: a folder, its FP8 twin, and what is left when that fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

from rose.batch import RaggedBatch
from rose.config import load_config
from rose.convert import __main__ as command
from rose.convert import folder as writing
from rose.convert.record import WatchedLinear
from rose.engine import EngineOptions, load_engine
from rose.kernels.fp8 import E4M3, Fp8Rows
from rose.reference import reference_vectors
from rose.weights import open_weights
from tests.unit.rose.bert_cases import least_cosine, random_sequences
from tests.unit.rose.parity import save_oracle

LENGTHS = (5, 1, 30)
SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def bert(folder: Path) -> Path:
    return save_oracle(folder, BertModel(BertConfig(**SIZES)))


def qwen3(folder: Path) -> Path:
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    return save_oracle(folder, Qwen3Model(config), pooling="last")


@pytest.fixture(params=[bert, qwen3])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path / "model")


def vectors_of(folder: Path, dtype: str, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    options = EngineOptions(device="cpu", dtype=dtype, num_threads=1)
    engine = load_engine(folder, options, dummy=False, model_name="test")
    result = engine.step(RaggedBatch.pack(random_sequences(load_config(folder), lengths))).result()
    engine.close()
    return torch.from_numpy(result.vectors.copy())


def test_the_twin_gives_what_its_folder_gives_in_fp8(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "fp8"
    assert command.main([str(folder), str(out)]) == 0
    count = 2 * (6 if load_config(folder).architecture == "bert" else 7)
    assert f"{out}: {count} FP8 weights" in capsys.readouterr().out
    torch.testing.assert_close(vectors_of(out, "fp8"), vectors_of(folder, "fp8"), rtol=1e-5, atol=1e-5)
    assert least_cosine(vectors_of(out, "fp8"), vectors_of(folder, "float32")) > 0.98


def test_other_dtypes_multiply_the_weights_out(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    command.convert(folder, out)
    assert load_config(out).fp8_weights
    plain = vectors_of(out, "auto")  # float32 on a CPU
    stored = load_file(out / "model.safetensors")
    for name in [name for name in stored if name.endswith("_scale")]:
        scale, weight = stored.pop(name), name.removesuffix("_scale")
        stored[weight] = stored[weight].float() * scale
    by_hand = tmp_path / "by_hand"
    shutil.copytree(folder, by_hand)
    save_file(stored, by_hand / "model.safetensors")
    torch.testing.assert_close(plain, vectors_of(by_hand, "float32"), rtol=1e-5, atol=1e-5)
    config = load_config(by_hand)
    expected = reference_vectors(config, open_weights(by_hand), random_sequences(config, LENGTHS))
    assert least_cosine(plain, expected) > 0.9999


def test_the_layout_is_compressed_tensors(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    command.convert(folder, out)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    scaled = {name.removesuffix("_scale") for name in after if name.endswith(".weight_scale")}
    assert scaled == {name for name in before if after[name].dtype is E4M3}
    assert {name for name in after if "input_scale" in name} == set()
    for name, tensor in before.items():
        if name not in scaled:
            assert torch.equal(after[name], tensor)
            continue
        scale = after[f"{name}_scale"]
        assert (scale.shape, scale.dtype) == ((len(tensor), 1), torch.float32)
        assert ((after[name].float() * scale - tensor).abs() <= tensor.abs() / 16 + scale * 2.0**-9).all()
        assert after[name].float().abs().amax(1).min() == 448  # all of the range is used
    linear = {
        name for name in before if before[name].dim() == 2 and "embed" not in name and name.endswith("weight")
    }
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {f"{name}.weight" for name in said["ignore"]} & set(before) == linear - scaled
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "float-quantized")
    group = said["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and "lm_head" in said["ignore"]
    assert (group["weights"]["strategy"], group["weights"]["dynamic"]) == ("channel", False)
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    with safe_open(out / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    rest = json.loads((folder / "config.json").read_text())
    assert {**rest, "quantization_config": said} == json.loads((out / "config.json").read_text())


def test_other_files_come_along_and_weights_in_other_layouts_do_not(tmp_path: Path) -> None:
    model, out = bert(tmp_path / "model"), tmp_path / "fp8"
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "model.safetensors").write_bytes(b"its own")
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"old")
    (model / ".git").mkdir()
    command.convert(model, out)
    assert (out / "2_Dense" / "model.safetensors").read_bytes() == b"its own"
    assert (out / "1_Pooling" / "config.json").is_file() and (out / "tokenizer.json").is_file()
    assert not (out / "pytorch_model.bin").exists() and not (out / ".git").exists()


def test_pickled_and_tied_weights_are_converted_too(tmp_path: Path) -> None:
    model, out = qwen3(tmp_path / "model"), tmp_path / "fp8"
    state = load_file(model / "model.safetensors")
    state["lm_head.weight"] = state["embed_tokens.weight"]
    torch.save({f"model.{name}": tensor for name, tensor in state.items()}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    command.convert(model, out)
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype is E4M3
    assert "model.layers.0.mlp.down_proj.weight_scale" in stored
    torch.testing.assert_close(vectors_of(out, "fp8"), vectors_of(model, "fp8"), rtol=1e-5, atol=1e-5)


def test_calibration_measures_every_input(minilm_folder: Path, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "fp8"
    texts.write_text("A cat sat on the mat.\n\nZwei Hunde bellen laut.\n")
    assert command.convert(minilm_folder, out, texts) == 36
    stored = load_file(out / "model.safetensors")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith(".input_scale")}
    assert len(scales) == 36 and {tuple(tensor.shape) for tensor in scales.values()} == {(1,)}
    attention = "encoder.layer.3.attention.self"
    assert scales[f"{attention}.query.input_scale"] == scales[f"{attention}.key.input_scale"]
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    inputs = said["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)
    # What the first layer reads are the embeddings: the largest of them is what 448 stands for.
    largest = first_inputs(minilm_folder, texts.read_text().split("\n"))
    assert scales["encoder.layer.0.attention.self.query.input_scale"] == pytest.approx(
        largest / 448, rel=1e-4
    )
    torch.testing.assert_close(vectors_of(out, "fp8"), vectors_of(minilm_folder, "fp8"), rtol=1e-5, atol=1e-5)


def test_the_scale_of_inputs_is_the_largest_of_any_row() -> None:
    weight = Fp8Rows(torch.ones(1, 16).to(E4M3), torch.ones(1, 1))
    linear = WatchedLinear(weight, None)
    for scales in ([0.5, 3.0], [1.0, 0.25]):
        linear(Fp8Rows(torch.ones(2, 16).to(E4M3), torch.tensor(scales)[:, None]), torch.zeros(2, 1))
    assert linear.input_scale == 3.0


def first_inputs(folder: Path, texts: list[str]) -> float:
    """The largest magnitude that transformers' embeddings of any text have."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        inputs = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts if text]
        return max(model.embeddings(ids).abs().max().item() for ids in inputs)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(arguments) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    return message


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path: Path, capsys) -> None:
    model, out = bert(tmp_path / "model"), tmp_path / "fp8"
    assert "nothing/config.json is missing" in refused([str(tmp_path / "nothing"), str(out)], capsys)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    calibrated = [str(model), str(out), "--calibration"]
    assert "holds no text" in refused([*calibrated, str(empty)], capsys)
    assert "nowhere.txt cannot be read" in refused([*calibrated, str(tmp_path / "nowhere.txt")], capsys)
    empty.write_text("text")
    assert "has no tokenizer.json" in refused([*calibrated, str(empty)], capsys)
    assert "no/where/fp8 cannot be written" in refused([str(model), str(tmp_path / "no/where/fp8")], capsys)
    assert not out.exists()
    command.convert(model, out)
    assert f"{out} exists" in refused([str(model), str(out)], capsys)
    assert f"{out} has FP8 weights already" in refused([str(out), str(tmp_path / "again")], capsys)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"intermediate_size": 95}))
    assert "multiple of 16" in refused([str(model), str(tmp_path / "odd")], capsys)


def test_nothing_is_left_of_a_conversion_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    model, out = bert(tmp_path / "model"), tmp_path / "fp8"
    monkeypatch.setattr(writing, "save_file", full)
    assert "No space left on device" in refused([str(model), str(out)], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main([str(model), str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
