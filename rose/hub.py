"""Downloads just the files of a hub repository that serving needs, at one commit."""

from __future__ import annotations

import fnmatch
import logging
import socket
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from rose.errors import ModelLoadError
from rose.progress import Bar

logger = logging.getLogger(__name__)

# Sub-folders are those of sentence-transformers modules: 1_Pooling/config.json, 2_Dense/model.safetensors.
SMALL_FILES = (
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "[0-9]_*/config.json",
)
SAFETENSORS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "[0-9]_*/model.safetensors",
)
PICKLED = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*-of-*.bin",
    "[0-9]_*/pytorch_model.bin",
)
# BGE-M3's heads, which are there as pickled state dicts only.
HEADS = ("sparse_linear.pt", "colbert_linear.pt")
HUB_TIMEOUT_S = 10.0
UNREACHABLE = (ConnectionError, TimeoutError, socket.gaierror, LocalEntryNotFoundError, OfflineModeIsEnabled)
# Packages whose errors are of the connection; which of them the hub's client uses depends on its version.
HTTP_CLIENTS = ("httpx", "httpx2", "requests")


def download(repo: str, revision: str | None, load_format: str) -> tuple[Path, str]:
    """Bring `repo` (org/name) into the hub's cache; returns its folder and the commit, 40 hex digits.

    revision: a commit, branch or tag; None is the newest. load_format "dummy" leaves all weights out.
    Without a network, what the cache already holds is used.

    Raises:
        ModelLoadError: no such repository or revision, no access, neither a network nor a cached copy, or
            weights that `load_format` does not take.
    """
    try:
        chosen = _chosen(repo, _listing(repo, revision), load_format)
        # By the name the user gave, not by commit: only so does the cache remember which commit a branch had.
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=chosen, tqdm_class=Bar))
    except ModelLoadError:
        raise
    except Exception as error:
        if not _means_unreachable(error):
            raise ModelLoadError(_refusal(repo, revision, error)) from error
        path = _cached(repo, revision, load_format)
    return path, path.name


def wanted_files(files: list[str], load_format: str) -> list[str]:
    """Of a repository's `files` those that serving reads: configs, tokenizer and one form of the weights.

    Chosen from the listing and not by pattern: a repository may hold the same weights in five formats.
    """
    small = [file for file in files if _matches(file, SMALL_FILES)]
    if load_format == "dummy":
        return small
    weights = [file for file in files if _matches(file, SAFETENSORS)]
    if load_format == "safetensors":
        return small + weights
    heads = [file for file in files if _matches(file, HEADS)]
    return small + weights + _only_pickled(files) + heads


def _only_pickled(files: list[str]) -> list[str]:
    """Pickled weights of folders without safetensors.

    By folder: sentence-transformers and the hub's conversion wrote the transformer as safetensors and left
    its Dense modules pickled.
    """
    converted = {_folder(file) for file in files if _matches(file, SAFETENSORS)}
    return [file for file in files if _matches(file, PICKLED) and _folder(file) not in converted]


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _chosen(repo: str, files: list[str], load_format: str) -> list[str]:
    """`wanted_files` of the repository, refused if they would leave one of its folders without weights."""
    pickled = _only_pickled(files)
    if load_format == "safetensors" and pickled:
        raise ModelLoadError(f"{repo} has {pickled[0]} as a pickle only; --load-format auto takes it")
    return wanted_files(files, load_format)


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    """As a shell would: `*` stays within one folder."""
    return any(
        file.count("/") == pattern.count("/") and fnmatch.fnmatchcase(file, pattern) for pattern in patterns
    )


def _listing(repo: str, revision: str | None) -> list[str]:
    found = HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
    return [sibling.rfilename for sibling in found.siblings or []]


def _means_unreachable(error: Exception) -> bool:
    """Whether the hub was not reached, or answered as a broken proxy or server does (5xx).

    An OSError of any other kind is the cache's: were it taken for the network's, a cache that cannot be
    written would be served at an old commit with the hub up.
    """
    if isinstance(error, HfHubHTTPError):
        return error.response is None or error.response.status_code >= 500
    return isinstance(error, UNREACHABLE) or type(error).__module__.partition(".")[0] in HTTP_CLIENTS


def _refusal(repo: str, revision: str | None, error: Exception) -> str:
    """What to tell of an error that a cached copy is no answer to."""
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub shows no model {repo}; if it is private, set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub's {repo} has no revision {revision}"
    if isinstance(error, HFValidationError):
        return f"{repo!r} is neither a folder nor a valid hub name (org/name)"
    if isinstance(error, OSError) and not isinstance(error, HfHubHTTPError):
        return (
            f"cannot download {repo} into {HF_HUB_CACHE}: {_first_line(error)}; HF_HUB_CACHE names another "
            "folder, HF_HUB_OFFLINE=1 takes what is there"
        )
    return f"cannot download {repo}: {_first_line(error)}"


def _cached(repo: str, revision: str | None, load_format: str) -> Path:
    patterns = [*SMALL_FILES, *(() if load_format == "dummy" else SAFETENSORS)]
    try:
        path = snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"cannot reach the hub for {repo}, and neither a folder of that name nor a cached copy is here; "
            "without a network give --model a folder, use the packaged model (--model minilm), or random "
            "weights of an alias (--load-format dummy)"
        ) from error
    except OSError as error:
        raise ModelLoadError(_refusal(repo, revision, error)) from error
    logger.warning("cannot reach the hub; using the cached copy of %s", repo)
    return Path(path)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
