"""The fastest tokeniser that is exact for a tokenizer.json, chosen by what the file says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.tokenization.base import Tokenizer
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tokenization.late import LateTokenizer
from gateway.tokenization.precompile import precompile
from gateway.tokenization.unsupported import UnsupportedError

if TYPE_CHECKING:
    from gateway.tokenization.kernels.kernel import Kernel

# Kernels' modules, by the type of model that tokenizer.json names.
_MODULES = {"Unigram": "unigram", "BPE": "bpe", "WordPiece": "wordpiece"}

logger = logging.getLogger(__name__)


def load_tokenizer(path: Path) -> LateTokenizer:
    """The tokenizer of a tokenizer.json. Its kernel is made or loaded when it is started.

    Raises:
        ModelLoadError: the file is missing or is not one that the library reads.
    """
    reference = HuggingFaceTokenizer.from_file(path)
    return LateTokenizer(reference, lambda: fastest(reference, path))


def fastest(reference: HuggingFaceTokenizer, path: Path) -> Tokenizer:
    """A compiled tokeniser with the ids of `reference`, of the tokenizer.json `path`; else `reference`."""
    try:
        if _needs_code(reference.describe()["model"].get("type")):
            precompile(path)
        return compiled(reference)
    except (UnsupportedError, ImportError) as reason:
        logger.info("%s: the tokenizers library does all the work: %s", path, reason)
        return reference.because(str(reason))
    except Exception as error:  # numba's errors are of many kinds, and a model is served without it as well
        logger.exception(
            "%s: the tokenizers library does all the work, as its kernel could not be made", path
        )
        return reference.because(f"{type(error).__name__}: {error}".partition("\n")[0])


def compiled(reference: HuggingFaceTokenizer) -> Tokenizer:
    """A compiled tokeniser that gives the ids of `reference`.

    Raises:
        UnsupportedError: there is none.
        ImportError: numba is not installed.
    """
    kernel = _kernel(reference.describe())
    from gateway.tokenization.compiled import CompiledTokenizer

    return CompiledTokenizer(reference, kernel)


def _needs_code(model: str) -> bool:
    """Whether there is a kernel for the model whose machine code is not kept."""
    if model not in _MODULES:
        return False
    from gateway.tokenization.kernels.kept import is_kept

    return not is_kept(_MODULES[model])


def _kernel(file: dict[str, Any]) -> Kernel:
    """The readers import numba, so each is imported for its own files only."""
    model = file["model"].get("type")
    if model == "Unigram":
        from gateway.tokenization.unigram import read_unigram

        return read_unigram(file)
    if model == "BPE":
        from gateway.tokenization.bpe import read_bpe

        return read_bpe(file)
    if model == "WordPiece":
        from gateway.tokenization.wordpiece import read_wordpiece

        return read_wordpiece(file)
    raise UnsupportedError(f"a {model} model")
