from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rose
from rose.config import load_config
from rose.layers.workspace import Workspace
from rose.step_size import activation_bytes, device_batch_tokens

PRESETS = Path(rose.__file__).parent / "presets"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("alias", "gib", "expected"),
    [
        ("pplx-embed", 140, 131_072),
        ("pplx-embed", 80, 65_536),
        ("pplx-embed", 24, 16_384),
        ("pplx-embed-4b", 140, 65_536),
        ("bge-m3", 140, 131_072),
        ("bge-m3", 8, 16_384),
    ],
)
def test_a_gpu_takes_as_much_as_its_memory_allows(alias: str, gib: int, expected: int) -> None:
    config = load_config(PRESETS / alias)
    tokens = device_batch_tokens(config, gib * GIB)
    assert tokens == expected
    assert tokens == 16_384 or tokens * activation_bytes(config) <= gib * GIB / 24


def test_no_tensor_has_more_values_than_int32_counts() -> None:
    config = replace(load_config(PRESETS / "pplx-embed"), intermediate_size=24_576)
    assert device_batch_tokens(config, 10_000 * GIB) == 32_768
    assert 65_536 * 2 * config.intermediate_size > (1 << 31) - 1 >= 32_768 * 2 * config.intermediate_size


def test_a_sparse_model_gets_no_more_than_others_have_at_least() -> None:
    config = load_config(PRESETS / "bge-m3")
    assert device_batch_tokens(replace(config, task="sparse"), 140 * GIB) == 16_384


def test_the_activations_are_no_more_than_what_is_counted() -> None:
    config = load_config(PRESETS / "pplx-embed")
    memory = Workspace(config, 4096, torch.bfloat16, torch.device("meta")).rows(4096)
    names = ("residual", "hidden", "qkv", "context", "wide", "narrow")
    assert sum(getattr(memory, name).nbytes for name in names) <= 4096 * activation_bytes(config)
