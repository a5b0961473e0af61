"""Every kernel of a Qwen3 forward compiles for an H200, with 16-byte accesses, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


@pytest.fixture(scope="module")
def compiled(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(repo_root)
    done = subprocess.run(
        [sys.executable, SCRIPT, repo_root / "rose" / "presets" / "pplx-embed"],
        env=environment,
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


def test_every_kernel_of_a_forward_is_compiled_ahead(compiled):
    forward = {"_embed_tokens", "_qk_norm_rope", "_rms_norm", "_silu_mul", "_split_k_gemm", "_swiglu_gemm"}
    assert all(compiled[name] for name in forward | {"_sum_parts", "_finish_mean"})
    assert len(compiled["_qk_norm_rope"]) >= 4  # in place and from partials, launched early or not


def test_activations_move_in_16_byte_accesses(compiled):
    """Narrow accesses are what a lost alignment hint looks like; int8 stores are narrow of themselves."""
    for name, variants in compiled.items():
        for wide, narrow, _ in variants:
            assert wide >= 2, name
            assert narrow == 0 or name == "_finish_mean", name


def test_kernels_launched_early_wait_for_the_one_before(compiled):
    for name, variants in compiled.items():
        waits = [count for *_, count in variants]
        assert waits.count(1) == waits.count(0) == len(waits) / 2, name
