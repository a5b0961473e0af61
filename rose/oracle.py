"""A model folder by `transformers` and `sentence-transformers`, fp32 on the CPU: what ours is held to.

For `server.py verify` and tests only. Both packages are optional; texts only pass through to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose.configs.fields import read_json
from rose.errors import ModelLoadError

if TYPE_CHECKING:
    from rose.batch import Float32, Int32
    from rose.config import ModelConfig

# Sentence-transformers' modules of a pipeline that change a vector's direction, by what follows "models.".
_MODULES = ("Pooling", "Dense")
_POOLINGS = {"last": "lasttoken"}
# Classes that transformers does not have: by which of its own they are, with an open mask.
_OWN_CODE = {"PPLXQwen3Model": "Qwen3", "PPLXQwen3ContextualModel": "Qwen3"}


class TransformersOracle:
    """One sequence at a time, without padding: the simplest way to run the authors' code."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Load the folder once more.

        Raises:
            ModelLoadError: the packages are not installed, or cannot load it; or the model scores.
        """
        if config.task != "embed":
            raise ModelLoadError("verify compares vectors; this model gives scores")
        try:
            self._model = _transformer(folder)
            self._tokenizer = _tokenizer(folder)
            self._modules = _modules(folder, config)
        except ImportError as error:
            raise ModelLoadError(f"verify needs sentence-transformers: {error}") from error
        except (OSError, ValueError, KeyError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelLoadError(f"transformers cannot load {folder}: {reason}") from error
        # transformers' decoders hide later tokens unless the mask is given in full.
        self._open_mask = not config.causal and config.architecture in ("qwen3", "qwen2", "llama")

    def token_ids(self, text: str) -> Int32 | None:
        """Ids i32[n] by the folder's own tokenizer class, special tokens included; None without one."""
        if self._tokenizer is None:
            return None
        return np.array(self._tokenizer(text)["input_ids"], np.int32)

    def vector(self, input_ids: Int32) -> Float32:
        """f32[D] of a sequence i32[n], as the last module but Normalize leaves it."""
        ids = torch.from_numpy(input_ids).long()[None]
        count = len(input_ids)
        given = {"attention_mask": torch.zeros(1, 1, count, count)} if self._open_mask else {}
        with torch.inference_mode():
            hidden = self._model(ids, **given).last_hidden_state
            features = {"token_embeddings": hidden, "attention_mask": torch.ones_like(ids)}
            for module in self._modules:
                features = module(features)
        vector: Float32 = features["sentence_embedding"][0].float().numpy()
        return vector


def _transformer(folder: Path) -> Any:
    """The bare transformer; of models with code of their own, transformers' class that they derive from."""
    import transformers

    output: Any = transformers.utils.logging
    output.set_verbosity_error()  # verify prints what is wrong, and nothing else
    output.disable_progress_bar()
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    names = fields.get("architectures") or [""]
    family = _OWN_CODE.get(names[0])
    if family is None:
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    else:
        settings = {key: value for key, value in fields.items() if key not in ("model_type", "auto_map")}
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}Model").from_pretrained(
            folder, config=config, dtype=torch.float32
        )
    return model.eval()


def _tokenizer(folder: Path) -> Any:
    import transformers

    if not (folder / "tokenizer.json").is_file():
        return None
    if (folder / "tokenizer_config.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(folder)
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _modules(folder: Path, config: ModelConfig) -> list[Any]:
    """Pooling and Dense modules, in order; without a modules.json the pooling that the config settled on."""
    from sentence_transformers.sentence_transformer import modules

    path = folder / "modules.json"
    if not path.is_file():
        return [modules.Pooling(config.hidden_size, _POOLINGS.get(config.pooling, config.pooling))]
    named: Any = read_json(path)
    entries = [(str(entry["type"]).rpartition(".")[2], entry["path"]) for entry in named]
    return [
        getattr(modules, kind).load(str(folder), subfolder=name, local_files_only=True).eval()
        for kind, name in entries
        if kind in _MODULES
    ]
