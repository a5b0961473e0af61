"""What callers need to know of a loaded model; a part of the contract in `rose.batch`, which names it too.

Apart, since replicas read it from JSON: msgspec fills classes of the interpreter's, and the rest of the
contract may be compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a step can give for each token, beside the vectors. "hidden": the transformer's last states, before any
# pooling. "lexical": how much the token's word weighs, one value, none below 0. "multi_vector": a vector of
# length 1, as ColBERT compares texts by them.
TokenOutput = Literal["hidden", "lexical", "multi_vector"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers need to know of a loaded model. Lengths in tokens.

    pooling: "mean", "cls" or "last".
    normalize: whether vectors are L2-normalised unless a request says not to.
    has_int8: whether BatchResult.int8 is given.
    max_batch_tokens, max_batch_seqs: the most one step takes.
    whole_job_tokens: up to so many tokens of one request are better in one step than in several, even if
        those would be large enough for full throughput; 0: they are not.
    attention: the attention backends in use, in order of preference.
    chunk_separator: the token between the chunks of a document, of models trained on such; None: nothing is.
    type_vocab_size: kinds of token types that the model tells apart; 0: it has none.
    task: "embed"; "score": D is len(labels), vectors hold one raw logit a label; or "sparse": D is
        vocab_size, vectors hold a weight for each word, most of them 0.
    labels: what the logits of a scorer are called.
    score_template: how a scorer wants a query and a document: "pair", as the tokenizer joins them, or
        "qwen3", in the words of Qwen3-Reranker's authors.
    prompts: what the model's authors put before a text, by name of the task, such as "query".
    default_prompt_name: which of them a text gets when its request names none; None: none.
    token_outputs: what a batch may ask for of each token, and how many values a token that is.
    max_token_bytes: the most that a step gives of them, in bytes of f32, padding not counted.
    unweighted_ids: ids that have no lexical weight, whatever the output says: special tokens.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    dimensions: int
    vocab_size: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_seqs: int
    pooling: str
    normalize: bool
    has_int8: bool = False
    attention: tuple[str, ...] = field(default=())
    chunk_separator: int | None = None
    type_vocab_size: int = 0
    task: str = "embed"
    labels: tuple[str, ...] = ()
    score_template: str = "pair"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    token_outputs: Mapping[TokenOutput, int] = field(default_factory=dict)
    max_token_bytes: int = 64 << 20
    unweighted_ids: tuple[int, ...] = ()
    whole_job_tokens: int = 0

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a text can be asked for: any of "dense", "sparse", "multi_vector" and "hidden"."""
        if self.task != "embed":
            return ("sparse",) if self.task == "sparse" else ()
        names = {"lexical": "sparse"}
        return ("dense", *(names.get(kind, kind) for kind in self.token_outputs))

    def bytes_a_token(self, kinds: Iterable[TokenOutput]) -> int:
        """Bytes of f32 that these kinds take for each token.

        Raises:
            KeyError: the model does not give one of them.
        """
        return 4 * sum(self.token_outputs[kind] for kind in kinds)

    def most_tokens(self, kinds: Collection[TokenOutput]) -> int:
        """The most tokens of a step that gives these kinds of each.

        Raises:
            KeyError: the model does not give one of them.
        """
        if not kinds:
            return self.max_batch_tokens
        return min(self.max_batch_tokens, self.max_token_bytes // self.bytes_a_token(kinds))
