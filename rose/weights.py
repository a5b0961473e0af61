"""Where a model's tensors come from: safetensors, pytorch_model.bin, memory, or a seeded generator.

Files are memory-mapped: a tensor's pages are read when the model copies it, so host memory stays near the
model's own size. Names are Hugging Face's; knows no architecture.
"""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from rose.configs.fields import Fields
from rose.errors import ModelLoadError

if TYPE_CHECKING:
    from rose.config import ModelConfig

Shape = tuple[int, ...]

# Heads wrap the encoder under one of these names; sentence-transformers saves the bare encoder.
_PREFIXES = ("", "model.", "bert.", "roberta.", "nomic_bert.")
# Whatever a family calls its norms: "LayerNorm", "attn_norm", "norm1", "emb_ln", "input_layernorm".
_NORM_WEIGHT = re.compile(r"(norm\d?|_ln)\.weight$", re.IGNORECASE)
_LAYER = re.compile(r"\blayers?\.(\d+)\.")
# What a file begins with that a clone without Git LFS has in place of a large one.
_LFS = b"version https://git-lfs"
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class WeightSource(Protocol):
    """Gives tensors by name, one at a time, so that no second copy of the model is held."""

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """The tensor `name` (without "model.", "bert." or "roberta."), in the dtype it is stored in.

        Raises:
            ModelLoadError: it is missing, or its shape is not `shape`; the message names tensor and folder.
        """
        ...


class MappedWeights:
    """Tensors by name from a mapping (a state dict, or the lazy view of safetensors files).

    origin: what error messages call the source, usually the folder.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
        self._tensors = tensors
        self._origin = origin

    def __repr__(self) -> str:
        return f"MappedWeights({self._origin!r}, {len(self._tensors)} tensors)"

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """See WeightSource.tensor."""
        found = self.stored_name(name)
        try:
            tensor = self._tensors[found]
        except SafetensorError as error:  # of a dtype that torch has not
            raise ModelLoadError(f"{self._origin}: tensor {found!r} cannot be read: {error}") from None
        if not isinstance(tensor, torch.Tensor):  # a pickle may hold anything
            raise ModelLoadError(f"{self._origin}: {found!r} is {type(tensor).__name__}, not a tensor")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self._origin}: tensor {found!r} is {list(tensor.shape)}, config.json wants {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{self._origin}: tensor {found!r} is {tensor.dtype}, which is no weight")
        return tensor

    def check_layers(self, num_layers: int) -> None:
        """Refuse weights of more layers than the model has: without them its vectors would be wrong ones.

        Other tensors that no model reads are common: heads of training, buffers of positions.

        Raises:
            ModelLoadError: see above.
        """
        for name in self._tensors:
            found = _LAYER.search(name)
            if found is not None and int(found[1]) >= num_layers:
                raise ModelLoadError(
                    f"{self._origin}: tensor {name!r} is of no layer; config.json has {num_layers} of them"
                )

    @property
    def stored(self) -> Mapping[str, torch.Tensor]:
        """All tensors, by the names they are stored under."""
        return self._tensors

    def stored_name(self, name: str) -> str:
        """The stored spelling of `name`: any prefix, and LayerNorm.gamma/beta as the first BERTs had it."""
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for spelling in (name, old):
            for prefix in _PREFIXES:
                if prefix + spelling in self._tensors:
                    return prefix + spelling
        raise ModelLoadError(f"{self._origin}: tensor {name!r} is missing from its weights")


class DummyWeights:
    """Random weights: norms are `norm`, all else N(0, 0.02), each tensor seeded by its own name.

    norm must make the factor of a norm 1. Gemma adds 1 to it: with a factor of 2 on q and on k, logits are
    four times a fresh model's, and over EmbeddingGemma's 24 layers bf16 loses 5 % of the cosine to fp32 (in
    transformers: 11 %); with 1, both lose 0.02 %.
    The same (seed, name, shape, kind of device) gives the same values whatever was asked for before. CPU and
    CUDA generators differ from each other.
    """

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu", norm: float = 1.0) -> None:
        self._seed = seed
        self._norm = norm
        self._device = torch.device(device)

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """See WeightSource.tensor; never fails."""
        if _NORM_WEIGHT.search(name):
            return torch.full(shape, self._norm, device=self._device)
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))  # the CPU's takes 32 bits only
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=generator)


def dummy_weights(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> WeightSource:
    """Seeded random weights for `config`, made on `device`."""
    return DummyWeights(seed, device, 1.0 - config.norm_offset)


def open_weights(folder: Path, *, fp8: bool = False, pickles: bool = True) -> FolderWeights:
    """Open the folder's weights: one file or a sharded index, safetensors before pytorch_model.bin.

    fp8: whether config.json says how FP8 tensors are scaled. pickles: False: those are refused.

    Raises:
        ModelLoadError: there are none, or a file is damaged, refused or holds more than tensors.
    """
    return FolderWeights(folder, fp8=fp8, pickles=pickles)


class FolderWeights:
    """Tensors of a model folder and of what is in it: "2_Dense/linear.weight" is of the folder 2_Dense.

    "head.pt/weight" is of the file head.pt, a state dict.
    """

    def __init__(self, folder: Path, *, fp8: bool, pickles: bool) -> None:
        self._folder = folder
        self._fp8 = fp8
        self._pickles = pickles
        self._parts = {"": _open_files(folder, pickles)}

    def __repr__(self) -> str:
        return f"FolderWeights({str(self._folder)!r})"

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """See WeightSource.tensor.

        Raises:
            ModelLoadError: also if it is of one byte an element and nothing says by what that is scaled.
        """
        part, inner = self._part(name)
        tensor = part.tensor(inner, shape)
        if tensor.itemsize == 1 and not (self._fp8 and tensor.dtype is torch.float8_e4m3fn):
            # Taken as they stand, such numbers give vectors that look like any others.
            reason = (
                f"only {torch.float8_e4m3fn} is supported"
                if self._fp8
                else "config.json has no quantization_config that says how it is scaled"
            )
            raise ModelLoadError(f"{self._folder}: tensor {name!r} is {tensor.dtype}; {reason}")
        return tensor

    @property
    def root(self) -> MappedWeights:
        """The tensors of the folder itself, without those of folders and files in it."""
        return self._parts[""]

    def _part(self, name: str) -> tuple[MappedWeights, str]:
        """The folder or file that `name` begins with, and its name there; tensors' names have no slash."""
        module, _, rest = name.rpartition("/")
        if module not in self._parts:
            path = self._folder / module
            opened = _open_state if path.suffix == ".pt" else _open_files
            self._parts[module] = opened(path, self._pickles)
        return self._parts[module], rest


def _open_state(path: Path, pickles: bool) -> MappedWeights:
    return MappedWeights(_load_pickled(path, pickles), str(path))


def stored_bytes(folder: Path) -> int:
    """Bytes of the files with the folder's own weights.

    Raises:
        ModelLoadError: there are none, or their index is damaged.
    """
    return sum(shard.stat().st_size for shard in _shards(_found(folder)) if shard.is_file())


def _found(folder: Path) -> Path:
    """The file with the weights, or the index of its shards."""
    try:
        path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from None
    if path is None:
        raise ModelLoadError(
            f"{folder}: no weights; one of {', '.join(_FILES)} is needed, or --load-format dummy"
        )
    return path


def _open_files(folder: Path, pickles: bool) -> MappedWeights:
    path = _found(folder)
    shards = _shards(path)
    if path.name.startswith("pytorch_model"):
        tensors: Mapping[str, torch.Tensor] = {
            k: v for shard in shards for k, v in _load_pickled(shard, pickles).items()
        }
    else:
        tensors = _SafetensorsFiles(shards)
    return MappedWeights(tensors, str(folder))


def _shards(path: Path) -> list[Path]:
    """The files that an index's weight_map names, each once; of no index the file itself."""
    if not path.name.endswith(".index.json"):
        return [path]
    index = Fields.read(path)
    names = set()
    for tensor, name in index.inside(index.get("weight_map"), "weight_map").values.items():
        if not isinstance(name, str):
            raise index.refuse(f"weight_map has {name!r} for {tensor!r}; a file's name is needed")
        names.add(name)
    return [path.parent / name for name in sorted(names)]


def _load_pickled(path: Path, allowed: bool) -> dict[str, torch.Tensor]:
    """A state dict, unpickled with weights_only so that no code in the file can run."""
    if not allowed:
        raise ModelLoadError(
            f"{path} is a pickle, which --load-format safetensors refuses; --load-format auto reads it"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # what a damaged or hostile pickle raises is not a closed set
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            reason = "it holds more than tensors, and nothing else is run"
        raise ModelLoadError(f"{path} cannot be read: {_pointer(path) or reason}") from None
    if not isinstance(state, dict):
        raise ModelLoadError(f"{path}: holds {type(state).__name__}, not a dictionary of tensors")
    for key in state:
        if not isinstance(key, str):
            raise ModelLoadError(f"{path}: has the key {key!r}, which is no tensor's name")
    return state


def _pointer(path: Path) -> str | None:
    """What to do if the file is one of Git LFS's pointers; None if it is not."""
    try:
        with path.open("rb") as file:
            is_one = file.read(len(_LFS)) == _LFS
    except (OSError, ValueError):
        return None
    return "it is a pointer of Git LFS; `git lfs pull` fetches the file itself" if is_one else None


class _SafetensorsFiles(Mapping[str, torch.Tensor]):
    """One mapping over memory-mapped safetensors files; a tensor is made when it is asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._owner: dict[str, Any] = {}  # safetensors has no type annotations
        for path in paths:
            try:
                path.open("rb").close()  # whatever keeps it from being read, safetensors says "No such file"
                opened: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelLoadError(f"{path} cannot be read: {_pointer(path) or error}") from None
            self._owner.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._owner[name].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)
