"""BGE-M3's heads over tokens, whose weights lie in files of their own beside the model's.

Source: FlagEmbedding, inference/embedder/encoder_only/m3.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.batch import TokenOutput

if TYPE_CHECKING:
    from rose.configs.fields import Fields

# Each holds the state dict of one linear layer.
HEAD_FILES: dict[TokenOutput, str] = {"lexical": "sparse_linear.pt", "multi_vector": "colbert_linear.pt"}
# Of XLM-R's vocabulary, which config.json does not say: <unk>.
_UNKNOWN_ID = 3


def read_token_heads(class_name: str, fields: Fields) -> tuple[TokenOutput, ...]:
    """The heads whose files are in the folder, or, where there are no weights at all, that config.json names.

    Raises:
        ModelLoadError: token_heads names one that is not known.
    """
    if class_name != "XLMRobertaModel":
        return ()
    named = fields.get("token_heads") or []
    if not isinstance(named, list) or not all(str(name) in HEAD_FILES for name in named):
        raise fields.refuse(f"token_heads {named!r} is not a list of {', '.join(HEAD_FILES)}")
    folder = fields.path.parent
    return tuple(kind for kind, file in HEAD_FILES.items() if kind in named or (folder / file).is_file())


def unweighted_ids(fields: Fields) -> tuple[int, ...]:
    """Ids of <s>, <pad>, </s> and <unk>, whose weights the authors drop. <mask> keeps its own."""
    named = (("bos_token_id", 0), ("pad_token_id", 1), ("eos_token_id", 2))
    return (*(fields.integer(key, default, least=0) for key, default in named), _UNKNOWN_ID)
