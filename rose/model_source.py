"""From the name a user gives to a folder of model files: alias, hub repository, folder, package or preset.

Knows no torch and reads no weights. Only a hub model makes it open a socket.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rose.errors import ModelLoadError
from rose.model_aliases import ALIASES, PACKAGES, Alias, alias_of

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "dummy"]
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in Hugging Face layout, ready to load.

    path: holds config.json and, unless it is a preset, the weights.
    name: what answers call the model by default: the alias, repository or folder name that was asked for.
    origin: where the files come from, for the log: "folder", "package NAME", "hub ORG/NAME" or "preset".
    revision: the hub commit, 40 hex digits; None for every other origin.
    """

    path: Path
    name: str
    origin: str
    revision: str | None = None


def resolve(name_or_path: str, load_format: LoadFormat = "auto", *, weights: bool = True) -> ModelFolder:
    """Find the folder that holds the model `name_or_path`.

    An existing folder wins over everything, then an installed package that ships the weights, then the hub.
    With load_format "dummy" only shapes are wanted: those of an alias, or of the repository behind one, ship
    with the project. weights: False: they are not downloaded, for whoever has no engine.

    Raises:
        ModelLoadError: nothing of that name is to be had; the message says what else would work.
    """
    path = _folder(name_or_path)
    if path is not None:
        return ModelFolder(_checked(path, load_format), path.name, "folder")
    alias = alias_of(name_or_path)
    if alias is None and _looks_like_path(name_or_path):
        raise ModelLoadError(
            f"no such folder: {name_or_path}; --model takes a folder, a hub name or an alias"
        )
    if alias is not None and load_format == "dummy":
        return ModelFolder(_checked(PRESETS / alias.name, load_format), name_or_path, "preset")
    if alias is not None and (packaged := _packaged(alias)) is not None:
        return ModelFolder(_checked(packaged[1], load_format), name_or_path, f"package {packaged[0]}")
    return _from_hub(name_or_path, alias, load_format if weights else "dummy")


def _folder(name: str) -> Path | None:
    """The folder of this name; None if there is none, or none is meant."""
    try:
        path = Path(name).expanduser()
        return path.resolve() if path.is_dir() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: it begins with ~user, and there is no such user
        if not _looks_like_path(name):
            return None  # the working folder is what cannot be read
        raise ModelLoadError(f"--model {name} cannot be read: {error}") from None


def _looks_like_path(name: str) -> bool:
    """Hub names are `name` or `org/name`; everything else can only have meant a folder."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")


def _checked(folder: Path, load_format: LoadFormat) -> Path:
    files = ("model.safetensors", "model.safetensors.index.json")
    try:
        has_config = (folder / "config.json").is_file()
        has_safetensors = any((folder / file).is_file() for file in files)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from None
    if not has_config:
        raise ModelLoadError(f"{folder} has no config.json: not a model folder in Hugging Face layout")
    if load_format == "safetensors" and not has_safetensors:
        raise ModelLoadError(
            f"{folder} has no {' or '.join(files)}; --load-format auto also takes pytorch_model.bin"
        )
    return folder


def _packaged(alias: Alias) -> tuple[str, Path] | None:
    """The first installed package that ships the alias's files. Finds it without running its code."""
    for package in PACKAGES.get(alias.name, ()):
        spec = importlib.util.find_spec(package.module)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(spec.submodule_search_locations[0]) / package.folder
        if (folder / "config.json").is_file():
            return package.distribution, folder
    return None


def _from_hub(name: str, alias: Alias | None, load_format: LoadFormat) -> ModelFolder:
    from rose.hub import download  # huggingface_hub takes 0.25 s to import, and a folder needs none of it

    if alias is None and "/" not in name:
        raise ModelLoadError(
            f"no model {name!r}: give a folder, a hub name (org/name) or one of {_aliases()}"
        )
    repo, _, wanted = name.partition("@")
    repo, pinned = (alias.repo, alias.revision) if alias is not None else (repo, wanted or None)
    path, commit = download(repo, pinned, load_format)
    logger.info("model %s is %s at commit %s", name, repo, commit)
    return ModelFolder(_checked(path, load_format), name, f"hub {repo}", commit)


def _aliases() -> str:
    return ", ".join(ALIASES)
