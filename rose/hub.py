"""Downloads just the files of a hub repository that serving needs, at one commit."""

from __future__ import annotations

import fnmatch
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    _CACHED_NO_EXIST,
    HfApi,
    get_cached_repo_tree,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from rose.errors import ModelLoadError
from rose.model_aliases import alias_of
from rose.model_source import PRESETS
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
UNREACHABLE = (ConnectionError, TimeoutError, socket.gaierror, LocalEntryNotFoundError)
# What the hub's client connects with, by its version.
HTTP_CLIENTS = ("httpx", "httpx2")


def download(repo: str, revision: str | None, load_format: str) -> tuple[Path, str]:
    """Bring `repo` (org/name) into the hub's cache; returns its folder and the commit, 40 hex digits.

    revision: a commit, branch or tag; None is the newest. load_format "dummy" leaves all weights out.
    Without a network, what the cache already holds is used if it is known to be whole: another tool may have
    put it there without the files that say how to pool.

    Raises:
        ModelLoadError: no such repository or revision, no access, neither a network nor a whole cached copy,
            or weights that `load_format` does not take.
    """
    listing: _Listing | None = None
    cause: Exception | None = None
    try:
        listing = _listing(repo, revision)
        chosen = _chosen(repo, listing.files, load_format)
        # By the name the user gave, not by commit: only so does the cache remember which commit a branch had.
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=chosen, tqdm_class=Bar))
    except ModelLoadError:
        raise
    except Exception as error:
        if not _means_unreachable(error):
            raise ModelLoadError(_refusal(repo, revision, error)) from error
        cause, path = error, _cached(repo, revision)
    _check_whole(repo, path, load_format, listing, cause)
    # The client may fall back on an older commit by itself.
    if listing is None or cause is not None or path.name != listing.commit:
        logger.warning("cannot reach the hub; using the cached copy of %s", repo)
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


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the hub says that a repository holds at one commit."""

    commit: str
    files: list[str]


def _listing(repo: str, revision: str | None) -> _Listing:
    found = HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
    return _Listing(str(found.sha), [sibling.rfilename for sibling in found.siblings or []])


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


def _cached(repo: str, revision: str | None) -> Path:
    """The folder of the cached copy, whatever it holds: by no pattern, the client checks nothing of it."""
    try:
        path = snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"cannot reach the hub for {repo}, and neither a folder of that name nor a cached copy is here; "
            "without a network give --model a folder, use the packaged model (--model minilm), or random "
            "weights of an alias (--load-format dummy)"
        ) from error
    except OSError as error:
        raise ModelLoadError(_refusal(repo, revision, error)) from error
    return Path(path)


def _check_whole(
    repo: str, path: Path, load_format: str, listing: _Listing | None, cause: Exception | None
) -> None:
    """Refuse a folder without all that serving wants of the commit, by the hub's listing or a cached one.

    cause: why the hub did not give what is missing, where that is known.
    """
    if listing is not None and listing.commit == path.name:
        files: list[str] | None = listing.files
    else:
        files = _cached_listing(repo, path.name)
    wanted = _unlisted(repo, path.name) if files is None else _chosen(repo, files, load_format)
    missing = [file for file in wanted if not (path / file).is_file()]
    if missing:
        raise ModelLoadError(_partial(repo, path, missing, cause, listed=files is not None)) from cause


def _partial(repo: str, path: Path, missing: list[str], cause: Exception | None, *, listed: bool) -> str:
    """What to tell of a cached copy without the files `missing`. listed: the hub does have them."""
    why = "" if cause is None else f" ({_first_line(cause.__cause__ or cause)})"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    # Taken as it is, an alias would have another head than the one it is known for.
    way_out = "" if listed or alias_of(repo) else "; if the hub has none either, give --model that folder"
    return (
        f"cannot reach the hub for {repo}{why}, and the cached copy {path} is not known to be whole: "
        f"it has no {missing[0]}{more}; start once with the hub in reach{way_out}"
    )


def _cached_listing(repo: str, commit: str) -> list[str] | None:
    """The listing that the client keeps of what it downloads as a whole, as this server does; None: none."""
    try:
        return [file.path for file in get_cached_repo_tree(repo, revision=commit)]
    except CachedRepoTreeNotFoundError:
        return None


def _unlisted(repo: str, commit: str) -> list[str]:
    """Files that a copy must have of which no listing is cached: an alias's settings, else modules.json.

    Without modules.json a model has the head of its architecture. A copy that transformers made lacks it
    whether or not the hub has it; who asks for it in vain, as sentence-transformers does, leaves a mark.
    """
    alias = alias_of(repo)
    wanted = ["modules.json"] if alias is None else _settings(PRESETS / alias.name)
    marks = {file: try_to_load_from_cache(repo, file, revision=commit) for file in wanted}
    return [file for file, mark in marks.items() if mark is not _CACHED_NO_EXIST]


def _settings(preset: Path) -> list[str]:
    return sorted(file.relative_to(preset).as_posix() for file in preset.rglob("*.json"))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
