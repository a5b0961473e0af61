"""Every kernel of a Qwen3 and of a BERT forward compiles for an H200, with wide accesses, without a GPU."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.programs import COMPILED_S, compiled_by

pytestmark = pytest.mark.timeout(COMPILED_S)
SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


# Kernel -> 16-byte accesses, narrow accesses, what it does about its neighbours; of each variant.
Variants = dict[str, list[tuple[int, int, str]]]
ORDERS = {"", "wait launch_dependents", "launch_dependents wait"}


@pytest.fixture(scope="module")
def compiled(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return compile_for_hopper(repo_root, tmp_path_factory.mktemp("triton"), "chosen")


def compile_for_hopper(repo_root: Path, cache: Path, plans: str) -> Variants:
    """Both parts at once, a core each."""

    def compiled(part: str) -> Variants:
        found: Variants = json.loads(
            compiled_by(SCRIPT, repo_root / "rose" / "presets", plans, part, cache=cache / part)
        )
        return found

    with ThreadPoolExecutor() as pool:
        decoder, encoders = pool.map(compiled, ("decoder", "encoders"))
    return {name: variants + encoders[name] for name, variants in decoder.items()}


DECODER = {
    "_embed_tokens",
    "_embed_rotary_qkv",
    "_qk_norm_rope",
    "_rms_norm",
    "_silu_mul",
    "_split_k_gemm",
    "_swiglu_gemm",
}
WINDOWED = {"_copy_real_rows", "_gelu_mul"}
FLAT = {"_flat_attention", "_flat_attention_of_product"}
FP8 = {"_quantize_rows", "_add_rms_norm_fp8", "_add_layer_norm_fp8", "_silu_mul_fp8", "_bias_gelu_fp8"}
FP8 |= {"_add_rms_norm_by_length"}
NARROW = {"_finish_mean", "_sum_parts", "_one_query", "_add_splits", "_add_tiles"}
ABSORBED = {"_absorb_queries", "_attend_tiles", "_add_tiles", "_project_values"}
ENCODER = {
    "_embed_bert",
    "_embed_bert_qkv",
    "_finish",
    "_add_layer_norm",
    "_one_query",
    "_add_splits",
    "_gather_rows",
}


def test_every_kernel_of_a_forward_is_compiled_ahead(compiled):
    assert all(
        compiled[name]
        for name in DECODER | ENCODER | ABSORBED | FLAT | FP8 | WINDOWED | {"_sum_parts", "_finish_mean"}
    )
    assert len(compiled["_qk_norm_rope"]) >= 5  # in place and from partials, of few heads and of many


def test_activations_move_in_16_byte_accesses(compiled):
    """Narrow accesses are what a lost alignment hint looks like.

    int8 stores are narrow of themselves, and a single head has fewer numbers than a program has threads.
    """
    assert_wide(compiled)


def test_kernels_launched_early_wait_for_the_one_before(compiled):
    """Up to 128 tokens; letting the next one come up after that, or before where a product gains by it."""
    for name, variants in compiled.items():
        orders = {order for *_, order in variants}
        assert orders <= ORDERS, name
        # Splits are added only beyond those: early where products gain, of which there are none here.
        assert not variants or "wait launch_dependents" in orders or name == "_add_splits", name
    alike = {"_qk_norm_rope", "_rms_norm", "_add_layer_norm", "_finish", "_silu_mul", "_one_query", *ABSORBED}
    for name in alike:
        assert {order for *_, order in compiled[name]} == ORDERS, name


@pytest.mark.long
def test_plans_of_the_table_in_use(repo_root, tmp_path):
    compiled = compile_for_hopper(repo_root, tmp_path, "measured")
    assert len(compiled["_split_k_gemm"]) > 20 and len(compiled["_swiglu_gemm"]) > 2
    assert_wide(compiled)
    assert {order for variants in compiled.values() for *_, order in variants} == ORDERS


def assert_wide(compiled: Variants) -> None:
    for name, variants in compiled.items():
        for wide, narrow, _ in variants:
            assert wide >= 1, name
            assert narrow == 0 or name in NARROW, name
