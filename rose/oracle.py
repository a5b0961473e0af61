"""A model folder by `transformers` and `sentence-transformers`, fp32 on the CPU: what ours is held to.

For `server.py verify` and tests only. Both packages are optional; texts only pass through to them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.nn.functional import normalize

from rose.batch import BatchResult
from rose.configs.fields import read_json
from rose.errors import ModelLoadError

if TYPE_CHECKING:
    from rose.batch import Float32, Int8, Int32, TokenOutput
    from rose.config import ModelConfig

# Sentence-transformers' modules of a pipeline that change a vector's direction, by what follows "models.".
_MODULES = ("Pooling", "Dense")
_POOLINGS = {"last": "lasttoken"}
# Nomic's own spelling of config.json: what transformers calls the same.
_NOMIC = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Classes that transformers does not have: by which of its own they are, with an open mask.
_OWN_CODE = {"PPLXQwen3Model": "Qwen3", "PPLXQwen3ContextualModel": "Qwen3"}

# BGE-M3's heads over tokens, each the state dict of a linear layer.
_HEADS: dict[TokenOutput, str] = {"lexical": "sparse_linear.pt", "multi_vector": "colbert_linear.pt"}

# The chat of the model card of Qwen/Qwen3-Reranker-0.6B, as there. The server has a copy of its own, so that
# a slip in either shows.
_CHAT_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_CHAT_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TASK = "Given a web search query, retrieve relevant passages that answer the query"


_Given: TypeAlias = "tuple[torch.Tensor, dict[TokenOutput, torch.Tensor]]"


class _Output(Protocol):
    """What the authors' code makes of one sequence: ids i64[1, n] and its other inputs, to f32[D].

    And f32[n, W] of each kind that it gives for tokens.
    """

    def __call__(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> _Given: ...


class TransformersOracle:
    """One sequence at a time, without padding: the simplest way to run the authors' code."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Load the folder once more.

        Raises:
            ModelLoadError: the packages are not installed, or cannot load it.
        """
        try:
            self._tokenizer = folder_tokenizer(folder)
            self._output = _output(folder, config, self._tokenizer)
        except ImportError as error:
            advice = f"this needs the extra `verify`: pip install -e '.[verify]' ({error})"
            raise ModelLoadError(advice) from error
        except Exception as error:  # whatever a model's own code raises
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelLoadError(f"transformers cannot load {folder}: {reason}") from error
        self._chats = config.scorer is not None and config.scorer.template == "qwen3"

    def tokens(self, texts: Sequence[str], max_tokens: int) -> tuple[Int32, Int32 | None] | None:
        """Ids i32[n] of a text or a pair by the folder's own tokenizer class, cut as the authors' code cuts.

        And token types i32[n], if the tokenizer gives any. None without a tokenizer.
        """
        if self._tokenizer is None:
            return None
        if self._chats:
            return self._chat(*texts, max_tokens=max_tokens), None
        encoded = self._tokenizer(*texts, truncation="longest_first", max_length=max_tokens)
        types = encoded.get("token_type_ids")
        return np.array(encoded["input_ids"], np.int32), None if types is None else np.array(types, np.int32)

    def result(self, input_ids: Int32, token_type_ids: Int32 | None = None) -> BatchResult:
        """What a sequence i32[n] gives alone: the vector as the last module but Normalize leaves it, raw
        logits, or SPLADE's weights; and of an embedder what its tokens give.
        """
        inputs = {}
        if token_type_ids is not None:
            inputs["token_type_ids"] = torch.from_numpy(token_type_ids).long()[None]
        with torch.inference_mode():
            vector, tokens = self._output(torch.from_numpy(input_ids).long()[None], inputs)
        values = {kind: rows.float().numpy() for kind, rows in tokens.items()}
        return BatchResult(vector.float().numpy()[None], tokens=values)

    def quantised(self, vectors: Float32) -> Int8:
        """i8[S, D] of f32[S, D]. Source: st_quantize.py of perplexity-ai/pplx-embed-v1-0.6b."""
        scaled = torch.round(torch.tanh(torch.from_numpy(vectors)) * 127)
        given: Int8 = torch.clamp(scaled, -128, 127).to(torch.int8).numpy()
        return given

    def _chat(self, query: str, document: str, *, max_tokens: int) -> Int32:
        """Source: process_inputs on the model card."""

        def ids(text: str) -> list[int]:
            plain: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return plain

        start, end = ids(_CHAT_START), ids(_CHAT_END)
        body = ids(f"<Instruct>: {_TASK}\n<Query>: {query}\n<Document>: {document}")
        return np.array(start + body[: max_tokens - len(start) - len(end)] + end, np.int32)


class _Embedding:
    """Hidden states through sentence-transformers' own modules."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._model = _transformer(folder)
        self._modules = _modules(folder, config)
        self._heads = {kind: _linear(folder / _HEADS[kind]) for kind in config.token_heads}
        # transformers' decoders hide later tokens unless the mask is given in full.
        self._open_mask = not config.causal and config.architecture in ("qwen3", "qwen2", "llama")

    def __call__(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> _Given:
        count = ids.shape[1]
        mask = {"attention_mask": torch.zeros(1, 1, count, count)} if self._open_mask else {}
        hidden = self._model(ids, **mask, **inputs).last_hidden_state
        features = {"token_embeddings": hidden, "attention_mask": torch.ones_like(ids)}
        for module in self._modules:
            features = module(features)
        return features["sentence_embedding"][0], self._tokens(hidden[0])

    def _tokens(self, hidden: torch.Tensor) -> dict[TokenOutput, torch.Tensor]:
        """f32[n, W] of hidden f32[n, H]. Source: FlagEmbedding, encoder_only/m3/modeling.py."""
        tokens: dict[TokenOutput, torch.Tensor] = {"hidden": hidden}
        for kind, head in self._heads.items():
            given = head(hidden)
            tokens[kind] = given.relu() if kind == "lexical" else normalize(given, dim=-1)
        return tokens


class _Classes:
    """The logits of a sequence classifier."""

    def __init__(self, folder: Path) -> None:
        self._model = _loaded(folder, "AutoModelForSequenceClassification")

    def __call__(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> _Given:
        logits: torch.Tensor = self._model(ids, **inputs).logits[0]
        return logits, {}


class _Answer:
    """The logit of the token that means yes, less that of no, after a language model's last token."""

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Any) -> None:
        self._model = _loaded(folder, "AutoModelForCausalLM")
        scorer = config.scorer
        if scorer is None:
            raise ValueError("no scorer")
        self._yes, self._no = scorer.true_id, scorer.false_id
        if tokenizer is not None and not (folder / "modules.json").is_file():
            self._yes, self._no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))

    def __call__(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> _Given:
        del inputs  # language models have no token types
        logits: torch.Tensor = self._model(ids).logits[0, -1]
        return (logits[self._yes] - (0.0 if self._no is None else logits[self._no]))[None], {}


class _Words:
    """SPLADE's weights of a masked language model."""

    def __init__(self, folder: Path) -> None:
        self._model = _loaded(folder, "AutoModelForMaskedLM")

    def __call__(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> _Given:
        logits: torch.Tensor = self._model(ids, **inputs).logits[0]
        return torch.log1p(torch.relu(logits)).amax(0), {}


def _output(folder: Path, config: ModelConfig, tokenizer: Any) -> _Output:
    if config.task == "sparse":
        return _Words(folder)
    if config.scorer is None:
        return _Embedding(folder, config)
    return _Answer(folder, config, tokenizer) if config.scorer.kind == "tokens" else _Classes(folder)


def _linear(path: Path) -> torch.nn.Linear:
    state = torch.load(path, map_location="cpu", weights_only=True)
    layer = torch.nn.Linear(*reversed(state["weight"].shape))
    layer.load_state_dict(state)
    return layer.float().eval()


def _loaded(folder: Path, auto_class: str) -> Any:
    """The model by one of transformers' Auto classes.

    Raises:
        ValueError: the folder lacks weights, which transformers would fill with random numbers.
    """
    import transformers

    output: Any = transformers.utils.logging
    output.set_verbosity_error()  # verify prints what is wrong, and nothing else
    output.disable_progress_bar()
    model, report = getattr(transformers, auto_class).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise ValueError(f"{auto_class} finds no {missing[0]}")
    return model.eval()


def _transformer(folder: Path) -> Any:
    """The bare transformer; of models with code of their own, transformers' class that they derive from."""
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    names = fields.get("architectures") or [""]
    family = _OWN_CODE.get(names[0])
    if "n_embd" in fields and "hidden_size" not in fields:
        family = "NomicBert"
        fields = {_NOMIC.get(key, key): value for key, value in fields.items()}
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": float(fields["rotary_emb_base"])}
    if family is None:
        return _loaded(folder, "AutoModel")
    import transformers

    settings = {key: value for key, value in fields.items() if key not in ("model_type", "auto_map")}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}Model").from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    return model.eval()


def folder_tokenizer(folder: Path) -> Any:
    """transformers' own of the folder, with the special tokens its authors' code adds; None without one."""
    import transformers

    if not (folder / "tokenizer.json").is_file():
        return None
    path = folder / "tokenizer_config.json"
    if path.is_file():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        ids, settings = tokenizer("a")["input_ids"], json.loads(path.read_text("utf-8"))
        if settings.get("add_eos_token") is not True or ids[-1] == tokenizer.eos_token_id:
            return tokenizer
        # transformers 4 honoured the file; 5 does if told so, and then needs to be told of the start as well.
        begins = ids[0] == tokenizer.bos_token_id
        return transformers.AutoTokenizer.from_pretrained(folder, add_eos_token=True, add_bos_token=begins)
    fast: Any = transformers.PreTrainedTokenizerFast
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return fast(tokenizer_file=str(folder / "tokenizer.json"), model_input_names=names)


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
