"""The oracle of `server.py verify`: loads what we load, and agrees with us on every family."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules.dense import Dense
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

import rose.oracle
import server
from rose.config import load_config
from rose.errors import ModelLoadError
from rose.oracle import TransformersOracle
from tests.unit.rose.bert_cases import least_cosine, random_sequences, run
from tests.unit.rose.parity import LENGTHS, add_modules, our_model, pooling_config, resized, save_oracle

FAMILIES: dict[str, PreTrainedModel] = {
    "roberta": RobertaModel(
        resized(RobertaConfig, pad_token_id=1, type_vocab_size=1), add_pooling_layer=False
    ),
    "nomic": NomicBertModel(resized(NomicBertConfig)),
    "modernbert": ModernBertModel(
        resized(ModernBertConfig, local_attention=16, cls_token_id=2, sep_token_id=3)
    ),
    "qwen2": Qwen2Model(resized(Qwen2Config, num_key_value_heads=1)),
    "pplx": Qwen3Model(resized(Qwen3Config, num_key_value_heads=1, head_dim=24)),
}
# What the authors' config.json says that transformers' own does not.
PPLX = {
    "architectures": ["PPLXQwen3Model"],
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
    "auto_map": {"AutoModel": "modeling.PPLXQwen3Model"},
}


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_ours(tmp_path: Path, family: str) -> None:
    folder = save_oracle(tmp_path, FAMILIES[family], "last" if family == "qwen2" else "mean")
    if family == "pplx":
        edit(folder, **PPLX)
    model = our_model(folder)
    assert model.config.causal == (family == "qwen2")
    sequences = random_sequences(model.config, LENGTHS)
    oracle = TransformersOracle(folder, model.config)
    assert oracle.tokens(["text"], 9) is None
    theirs = torch.from_numpy(np.stack([oracle.result(ids).vectors[0] for ids in sequences]))
    assert least_cosine(run(model, sequences).vectors, theirs) >= 0.99999


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_odd_inputs(tmp_path: Path, family: str, pooling: str) -> None:
    """Special ids and nothing else, one id all along, single tokens, and as many as the model takes."""
    folder = save_oracle(tmp_path, FAMILIES[family], pooling)
    if family == "pplx":
        edit(folder, **PPLX)
    model = our_model(folder)
    longest = model.config.max_model_len
    repeated = [np.full(length, token, np.int32) for token in (0, 2, 100) for length in (1, 3, longest)]
    sequences = repeated + random_sequences(model.config, [1, longest, 2, longest - 1])
    oracle = TransformersOracle(folder, model.config)
    theirs = torch.from_numpy(np.stack([oracle.result(ids).vectors[0] for ids in sequences]))
    assert least_cosine(run(model, sequences).vectors, theirs) >= 0.99999


def test_nomics_own_spelling(tmp_path: Path) -> None:
    """As its config.json was published first, which transformers reads as a model of its default sizes."""
    folder = save_oracle(tmp_path, FAMILIES["nomic"])
    fields = json.loads((folder / "config.json").read_text())
    shapes = {"n_embd": 60, "n_head": 5, "n_inner": 92, "n_layer": 4, "n_positions": 128}
    own = {"layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_scaling_factor": None}
    kept = {key: fields[key] for key in ("architectures", "model_type", "vocab_size", "type_vocab_size")}
    (folder / "config.json").write_text(json.dumps(kept | shapes | own))
    model = our_model(folder)
    ids = random_sequences(model.config, [30])
    theirs = torch.from_numpy(TransformersOracle(folder, model.config).result(ids[0]).vectors)
    assert least_cosine(run(model, ids).vectors, theirs) >= 0.99999


def test_dense_modules_are_part_of_it(tmp_path: Path) -> None:
    folder = save_oracle(tmp_path, FAMILIES["modernbert"])
    add_modules(folder, {"1_Pooling": pooling_config("max", 60), "2_Dense": {}, "3_Normalize": {}})
    Dense(60, 16).save(str(folder / "2_Dense"))
    model = our_model(folder)
    ids = random_sequences(model.config, [30])
    theirs = torch.from_numpy(TransformersOracle(folder, model.config).result(ids[0]).vectors)
    assert theirs.shape == (1, 16) and least_cosine(run(model, ids).vectors, theirs) >= 0.99999


def test_an_unknown_folder_and_missing_weights_are_refused(tmp_path: Path) -> None:
    config = load_config(save_oracle(tmp_path / "other", FAMILIES["roberta"]))
    edit(tmp_path / "other", model_type="unheard-of")
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        TransformersOracle(tmp_path / "other", config)
    # transformers would give a classifier that is not there random weights.
    folder = save_oracle(tmp_path, BertModel(resized(BertConfig)))
    (folder / "modules.json").unlink()
    edit(folder, architectures=["BertForSequenceClassification"])
    with pytest.raises(ModelLoadError, match=r"finds no classifier\.bias"):
        TransformersOracle(folder, load_config(folder))


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, minilm_folder: Path
) -> None:
    """0 for a model that is right, 1 for one that is not and for one that cannot be loaded."""
    monkeypatch.setattr(server, "set_up_logging", lambda level: None)
    small = ModernBertModel(resized(ModernBertConfig, vocab_size=30522, max_position_embeddings=512))
    folder = save_oracle(tmp_path, small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (minilm_folder / name).is_file():
            (folder / name).write_bytes((minilm_folder / name).read_bytes())
    command = ["verify", "--model", str(folder), "--device", "cpu", "--threads", "1"]
    assert server.main(command) == 0
    assert "27 texts, worst cosine" in capsys.readouterr().out
    assert server.main([*command, "--threshold", "1.01"]) == 1
    assert "NOT the same" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    assert server.main(command) == 1
    assert capsys.readouterr().err.startswith("error: ")


def verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The worst case of each output, after the command has found the model right."""
    capsys.readouterr()
    status = server.main(["verify", "--model", str(folder), "--device", "cpu", "--threads", "1"])
    *others, main = capsys.readouterr().out.splitlines()
    assert (status, main.endswith("the same")) == (0, True), main
    return dict(line.removeprefix("27 texts, ").split(": worst ") for line in others)


def test_the_command_compares_int8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "set_up_logging", lambda level: None)
    folder = save_oracle(tmp_path, FAMILIES["pplx"])
    edit(folder, **PPLX)
    (folder / "modules.json").unlink()
    worst = verified(folder, capsys)
    assert list(worst) == ["hidden", "int8"] and worst["int8"].startswith("share 0.0000")


def test_the_command_compares_what_tokens_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a BGE-M3 with its heads; with other weights in one of them it fails by that one."""
    monkeypatch.setattr(server, "set_up_logging", lambda level: None)
    config = resized(XLMRobertaConfig, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    folder = save_oracle(tmp_path, XLMRobertaModel(config, add_pooling_layer=False), "cls")
    widths = {"sparse_linear.pt": 1, "colbert_linear.pt": 60}
    for name, width in widths.items():
        torch.save(torch.nn.Linear(60, width).state_dict(), folder / name)
    assert list(verified(folder, capsys)) == ["lexical", "multi_vector", "hidden"]
    monkeypatch.setattr(rose.oracle, "_linear", lambda path: torch.nn.Linear(60, widths[path.name]))
    assert server.main(["verify", "--model", str(folder), "--device", "cpu", "--threads", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines[:-4]} == {"lexical", "multi_vector"}
    assert lines[-1].endswith("NOT the same")


@pytest.mark.long
def test_the_command_on_real_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, minilm_folder: Path
) -> None:
    monkeypatch.setattr(server, "set_up_logging", lambda level: None)
    assert server.main(["verify", "--model", str(minilm_folder), "--device", "cpu"]) == 0
    assert "the same" in capsys.readouterr().out
