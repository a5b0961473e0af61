"""Whether a folder's weights are FP8, as compressed-tensors lays them out; all else is refused by name.

Source: the layout as vLLM and SGLang read it: X.weight in e4m3, X.weight_scale [rows, 1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose.configs.fields import Fields

_FORMATS = ("float-quantized", "naive-quantized")
# What must be said of weights, and what compressed-tensors takes silence for.
_WEIGHTS = {
    "num_bits": (8, 8),
    "type": ("float", "int"),
    "strategy": ("channel", "tensor"),
    "symmetric": (True, True),
}


def has_fp8_weights(fields: Fields) -> bool:
    """By config.json's quantization_config; without one weights are plain.

    What it says of inputs is left to who runs the products: here every token has a scale of its own.

    Raises:
        ModelLoadError: the weights are in any other layout.
    """
    value = fields.get("quantization_config")
    if value is None:
        return False
    config = fields.inside(value, "quantization_config")
    if (method := config.get("quant_method")) != "compressed-tensors":
        raise fields.refuse(
            f"quant_method {method!r} is not supported; compressed-tensors with FP8 weights is"
        )
    if (layout := config.get("format")) not in _FORMATS:
        raise fields.refuse(f"compressed-tensors' format {layout!r} is not supported; {_FORMATS[0]!r} is")
    groups = config.inside(config.get("config_groups"), "config_groups")
    for name, group in groups.values.items():
        weights = groups.inside(groups.inside(group, name).get("weights"), f"weights of {name}")
        for key, (only, default) in _WEIGHTS.items():
            if (found := weights.get(key, default)) != only:
                raise fields.refuse(f"{key} {found!r} of the weights of {name} is not supported; {only!r} is")
    return True
