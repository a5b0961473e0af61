"""Writes a model folder with FP8 weights, in compressed-tensors' layout, whole or not at all.

Source: the layout as vLLM's CompressedTensorsW8A8Fp8 reads it: X.weight e4m3[N, K], X.weight_scale f32[N, 1]
and, where inputs have a fixed scale, X.input_scale f32[1]; `ignore` names the linear layers left as they are.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rose.configs.fields import Fields
from rose.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from rose.convert.record import Product
    from rose.weights import MappedWeights

# Weights of the folder itself, in any layout: replaced by one file.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
# Of layers that are no nn.Linear, which compressed-tensors takes no notice of.
_TABLES = ("embed",)


def fp8_tensors(stored: MappedWeights, products: Mapping[str, Product], static: bool) -> dict[str, Tensor]:
    """All tensors of the new folder by their names there. static: with the products' input scales."""
    converted = {stored.stored_name(f"{name}.weight"): product for name, product in products.items()}
    tensors = {}
    for name, tensor in stored.stored.items():
        product = converted.get(name)
        if product is None:
            tensors[name] = tensor.clone()  # tied ones share memory, which safetensors does not store
            continue
        layer = name.removesuffix(".weight")
        tensors[name] = product.weight.values.contiguous()
        tensors[f"{layer}.weight_scale"] = product.weight.scale.contiguous()
        if static:
            tensors[f"{layer}.input_scale"] = torch.tensor([product.linear.input_scale])
    return tensors


def quantization_config(tensors: Mapping[str, Tensor], static: bool) -> dict[str, object]:
    """What config.json says of them."""
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {"strategy": "tensor", "dynamic": False} if static else {"strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": eight_bits | {"strategy": "channel", "dynamic": False},
        "input_activations": eight_bits | inputs,
        "output_activations": None,
    }
    plain = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and f"{name}_scale" not in tensors
    }
    ignored = {name for name in plain if not any(word in name for word in _TABLES)}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored | {"lm_head"}),
        "kv_cache_scheme": None,
    }


def write_folder(source: Path, out: Path, tensors: Mapping[str, Tensor], static: bool) -> None:
    """`source` with these tensors in the place of its weights. `out` appears when all of it is written.

    Raises:
        ModelLoadError: `out` exists, or cannot be written; then nothing is left of it.
    """
    check_absent(out)
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ModelLoadError(f"{out} cannot be written: {error}") from None
    try:
        shutil.copytree(source, partial, dirs_exist_ok=True, ignore=_left_out(source))
        fields = dict(Fields.read(source / "config.json").values)
        fields["quantization_config"] = quantization_config(tensors, static)
        (partial / "config.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")
        save_file(dict(tensors), partial / "model.safetensors", metadata={"format": "pt"})
        # What mkdtemp and safetensors write is for its owner alone.
        shutil.copymode(partial / "config.json", partial / "model.safetensors")
        partial.chmod(0o755)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{out} cannot be written: {error}") from None
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(partial)


def check_absent(out: Path) -> None:
    """Refuse to write where something is.

    Raises:
        ModelLoadError: `out` exists.
    """
    if out.exists():
        raise ModelLoadError(f"{out} exists; name a folder that does not")


def _left_out(source: Path) -> Callable[[str, list[str]], set[str]]:
    """Of a folder's files those not to copy: weights beside config.json, and whatever is hidden."""
    weights = shutil.ignore_patterns(*_WEIGHTS)
    hidden = shutil.ignore_patterns(".*")

    def names(folder: str, files: list[str]) -> set[str]:
        return hidden(folder, files) | (weights(folder, files) if Path(folder) == source else set())

    return names
