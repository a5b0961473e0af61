"""Every kernel of a Qwen3 and of a BERT forward compiles for an H200, with wide accesses, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


@pytest.fixture(scope="module")
def compiled(
    repo_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, int, str]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(repo_root)
    done = subprocess.run(
        [sys.executable, SCRIPT, repo_root / "rose" / "presets"],
        env=environment,
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[tuple[int, int, str]]] = json.loads(done.stdout)
    return found


DECODER = {"_embed_tokens", "_qk_norm_rope", "_rms_norm", "_silu_mul", "_split_k_gemm", "_swiglu_gemm"}
ENCODER = {"_embed_bert", "_finish", "_add_layer_norm", "_pick_rows", "_gather_rows"}


def test_every_kernel_of_a_forward_is_compiled_ahead(compiled):
    assert all(compiled[name] for name in DECODER | ENCODER | {"_sum_parts", "_finish_mean"})
    assert len(compiled["_qk_norm_rope"]) >= 5  # in place and from partials, of few heads and of many


def test_activations_move_in_16_byte_accesses(compiled):
    """Narrow accesses are what a lost alignment hint looks like; int8 stores are narrow of themselves."""
    for name, variants in compiled.items():
        for wide, narrow, _ in variants:
            assert wide >= 1, name
            assert narrow == 0 or name in ("_finish_mean", "_sum_parts"), name


def test_kernels_launched_early_wait_for_the_one_before(compiled):
    """Up to 128 tokens; letting the next one come up after that, or before where a product gains by it."""
    allowed = {"", "wait launch_dependents", "launch_dependents wait"}
    for name, variants in compiled.items():
        orders = {order for *_, order in variants}
        assert orders <= allowed, name
        assert not variants or "wait launch_dependents" in orders, name
    for name in ("_qk_norm_rope", "_rms_norm", "_add_layer_norm", "_finish", "_pick_rows"):
        assert {order for *_, order in compiled[name]} == allowed, name
