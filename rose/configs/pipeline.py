"""What follows the transformer, as sentence-transformers writes it: modules.json, its folders, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rose.configs.fields import Fields, read_json
from rose.configs.model import Activation, Dense, Head, Pooling
from rose.errors import ModelLoadError

# Both spellings of sentence-transformers: booleans before 5.3, one name since.
_POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "max": "max",
    "max_tokens": "max",
    "weightedmean": "weightedmean",
    "weightedmean_tokens": "weightedmean",
}
# torch's classes by their last name; sentence-transformers takes an absent one for Tanh.
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


@dataclass(slots=True)
class _Pipeline:
    """The modules read so far."""

    pooling: Pooling | None = None
    dense: list[Dense] = field(default_factory=list)
    normalize: bool = False
    quantizer: Literal["tanh_int8"] | None = None
    scores: bool = False
    gives_words: bool = False

    def add(self, kind: str, folder: Path, name: str) -> bool:
        """Take in a module; whether it is known and may stand here. name: of its folder."""
        if kind == "Pooling" and self.pooling is None:
            self.pooling = _read_pooling(folder / name / "config.json")
        elif kind == "SpladePooling" and self.pooling is None:
            self.pooling = _read_splade(folder / name / "config.json")
        elif kind == "LogitScore" and self.pooling is None:
            self.scores = True
        elif self.pooling is None or self.quantizer is not None:
            self.gives_words = self.gives_words or kind == "MLMTransformer"
            return kind in ("Transformer", "MLMTransformer") and self.pooling is None
        elif kind == "Dense" and not self.normalize:
            self.dense.append(_read_dense(folder / name / "config.json", name))
        elif kind == "Normalize":
            self.normalize = True
        elif kind == "FlexibleQuantizer":
            self.quantizer = "tanh_int8"
        else:
            return False
        return True


def read_head(folder: Path, default: Head) -> Head:
    """Follow modules.json: Transformer, Pooling, any Dense, then Normalize or the int8 quantiser.

    A scorer's has its Transformer alone, or with a LogitScore.

    Raises:
        ModelLoadError: a module is unknown or at a place where it would be skipped; the message names it.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return default
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path}: not a list of modules")
    pipeline = _Pipeline()
    for module in modules:
        kind = str(module.get("type", ""))
        if not pipeline.add(kind.rpartition(".")[2], folder, str(module.get("path", ""))):
            raise ModelLoadError(f"{path}: module {kind!r} is not supported at its place")
    if pipeline.pooling is None and default.task == "score":
        return default
    if pipeline.pooling is None or pipeline.scores:
        raise ModelLoadError(f"{path}: no Pooling module; only models that pool their tokens are supported")
    if pipeline.pooling == "splade":
        if pipeline.dense or pipeline.normalize or pipeline.quantizer:
            raise ModelLoadError(f"{path}: nothing may follow SpladePooling")
        return Head("sparse", "splade")
    if pipeline.gives_words:
        raise ModelLoadError(f"{path}: MLMTransformer is supported before SpladePooling only")
    return Head("embed", pipeline.pooling, pipeline.normalize, pipeline.quantizer, tuple(pipeline.dense))


def check_dense(head: Head, hidden_size: int, path: Path) -> None:
    """Refuse Dense modules that do not fit the transformer or one another."""
    width = hidden_size
    for dense in head.dense:
        if dense.in_features != width:
            reason = f"takes {dense.in_features} features, what precedes it gives {width}"
            raise ModelLoadError(f"{path.parent / dense.folder}: {reason}")
        width = dense.out_features


def read_prompts(folder: Path) -> tuple[Mapping[str, str], str | None]:
    """prompts and default_prompt_name of config_sentence_transformers.json; none if it is not there."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    fields = Fields.read(path)
    prompts = fields.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise fields.refuse("prompts is not an object of texts")
    default = fields.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise fields.refuse(f"default_prompt_name {default!r} is none of the prompts {sorted(prompts)}")
    return prompts, default


def _read_splade(path: Path) -> Pooling:
    fields = Fields.read(path)
    fields.require("pooling_strategy", "max")
    fields.require("activation_function", "relu")
    return "splade"


def _read_pooling(path: Path) -> Pooling:
    fields = Fields.read(path)
    if fields.get("include_prompt", True) is not True:
        raise fields.refuse("include_prompt false is not supported")
    named = fields.get("pooling_mode")
    prefix = "pooling_mode_"
    if named is None:
        modes = [
            key.removeprefix(prefix) for key, on in fields.values.items() if key[:13] == prefix and on is True
        ]
    else:
        modes = [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        known = "mean, cls, lasttoken, max or weightedmean"
        raise fields.refuse(f"pooling {modes} is not supported; one of {known} is")
    return _POOLINGS[modes[0]]


def _read_dense(path: Path, name: str) -> Dense:
    fields = Fields.read(path)
    fields.require("use_residual", False)
    for key in ("module_input_name", "module_output_name"):
        fields.require(key, "sentence_embedding")
    activation = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or kind not in _ACTIVATIONS:
        raise fields.refuse(
            f"activation_function {activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}"
        )
    return Dense(
        folder=name,
        in_features=fields.integer("in_features"),
        out_features=fields.integer("out_features"),
        bias=fields.get("bias", True) is True,
        activation=_ACTIVATIONS[kind],
    )
