"""Which quantised weights a folder may have, and the refusal of all others by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.config import load_config
from tests.unit.rose.config_folders import QWEN3, model_folder, refusal_of

FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
GROUP = FP8["config_groups"]["group_0"]


def test_fp8_weights_are_known_by_their_layout(tmp_path: Path) -> None:
    assert load_config(model_folder(tmp_path, QWEN3 | {"quantization_config": FP8})).fp8_weights
    assert not load_config(model_folder(tmp_path, QWEN3)).fp8_weights


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method 'fp8'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "quantization_config is not an object"),
        (FP8 | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (FP8 | {"config_groups": {"a": {"weights": GROUP["weights"] | {"num_bits": 4}}}}, "num_bits 4"),
        (FP8 | {"config_groups": {"a": {"weights": GROUP["weights"] | {"strategy": "block"}}}}, "'block'"),
        (FP8 | {"config_groups": {"a": {"weights": {"strategy": "channel"}}}}, "type 'int'"),
        (FP8 | {"config_groups": {"a": {"weights": None}}}, "weights of a is not an object"),
        (FP8 | {"config_groups": []}, "config_groups is not an object"),
    ],
)
def test_other_quantized_weights_are_refused_by_name(
    tmp_path: Path, quantization: object, named: str
) -> None:
    assert named in refusal_of(model_folder(tmp_path, QWEN3 | {"quantization_config": quantization}))
