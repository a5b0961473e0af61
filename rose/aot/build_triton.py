"""The command `python -m rose.aot.build_triton`: compile the Triton kernels of all presets ahead of time.

Needs no GPU. Each preset goes through `compile_ahead`, as on a server, but on tensors of torch's device
"meta", which have shapes and no memory: what is asked for here is what a server asks for. Takes a minute on
one core. Run in a process of its own, for torch and Triton are told that there is a Hopper GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver

from rose.aot.folders import default_output
from rose.aot.products import ProductKernel
from rose.attention import policy
from rose.config import ModelConfig, load_config
from rose.engine_options import MOST_BATCH_TOKENS
from rose.kernels import early, fused, gemm
from rose.kernels.cuda.wide import WIDE
from rose.kernels.jit import prebuilt
from rose.layers import decoder_stack, encoder_stack, token_qkv
from rose.layers.compile_ahead import compile_ahead, row_counts
from rose.layers.decoder_stack import DecoderStack
from rose.layers.encoder_stack import EncoderStack
from rose.models import bert, qwen3
from rose.models.registry import build_model

if TYPE_CHECKING:
    from rose.attention.base import AttentionSpec
    from rose.device_batch import DeviceBatch
    from rose.kernels.cuda.cubin import CudaSource
    from rose.kernels.cuda.library import CudaLibrary
    from rose.layers.decoder import DecoderLayer
    from rose.layers.encoder import EncoderBuffers, EncoderLayer
    from rose.layers.workspace import DecoderBuffers

PRESETS = Path(__file__).parents[1] / "presets"
CAPABILITY = (9, 0)
_H200_PROCESSORS = 132


class HopperDriver:
    """As much of Triton's driver as compiling asks for."""

    utils = None

    def get_current_target(self) -> GPUTarget:
        """Compute capability 9.0, 32 threads a warp."""
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def launcher_cls(self, source: ASTSource, metadata: object) -> None:
        """Nothing is launched."""


class ShapesOnly:
    """Weights without values."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource.tensor; never fails."""
        return torch.empty(shape, device="meta")


class IdleDecoder(DecoderStack):
    """Takes the place of all layers and launches nothing."""

    def __init__(self) -> None:
        """Without kernels."""

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        spec: AttentionSpec,
        library_of: Callable[[CudaSource], CudaLibrary | None] | None = None,
    ) -> DecoderStack | None:
        """See DecoderStack.of; as if the kernels were built."""
        return cls() if decoder_stack.fits(layers, spec) else None

    def takes(self, num_tokens: int) -> bool:
        """See DecoderStack.takes."""
        return num_tokens <= WIDE.max_tokens

    def __call__(self, batch: DeviceBatch, rows: DecoderBuffers) -> torch.Tensor:
        """See DecoderStack."""
        return rows.hidden


class IdleEncoder(EncoderStack):
    """The same for encoders."""

    def __init__(self) -> None:
        """Without kernels."""

    @classmethod
    def of(
        cls,
        layers: Sequence[EncoderLayer],
        spec: AttentionSpec,
        library_of: Callable[[CudaSource], CudaLibrary | None] | None = None,
    ) -> EncoderStack | None:
        """See EncoderStack.of; as if the kernels were built."""
        return cls() if encoder_stack.fits(layers, spec) else None

    def takes(self, num_tokens: int) -> bool:
        """See EncoderStack.takes."""
        return num_tokens <= WIDE.max_tokens

    def __call__(self, batch: DeviceBatch, hidden: torch.Tensor, buffers: EncoderBuffers) -> None:
        """See EncoderStack."""


@contextmanager
def hopper(with_products: bool, with_stack: bool) -> Iterator[None]:
    """Everything asks for kernels as on a Hopper GPU.

    with_products: whether ours are built there too. with_stack: whether it has room for all layers in one.
    """
    table = gemm.table_in_use(skinny=with_products)
    attention = policy.table_for("", CAPABILITY, policy.load_tables())
    properties = SimpleNamespace(multi_processor_count=_H200_PROCESSORS)
    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        (torch.Tensor, "is_cuda", True),
        (torch.Tensor, "data_ptr", lambda x: x.storage_offset() * x.element_size()),  # decides alignment
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (early, "_can_launch_early", lambda device: True),
        (gemm, "table", lambda: table),
        (gemm, "_skinny_gemm", _nothing),
        (fused, "load", _fused_product if with_products else _nothing),
        (qwen3, "DecoderStack", IdleDecoder if with_stack else DecoderStack),
        (bert, "EncoderStack", IdleEncoder if with_stack else EncoderStack),
        (policy, "_device_table", lambda spec: attention),
        (token_qkv, "_has_room", lambda embeddings, width: with_products),
    )
    with ExitStack() as stack:
        for owner, name, value in stand_ins:
            stack.enter_context(patch.object(owner, name, value))
        yield


def ask_for_kernels(config: ModelConfig) -> None:
    """Launch what a server of this model compiles at its start."""
    # The stages behind a pooling use no kernels.
    config = replace(config, scorer=None, dense=())
    model = build_model(config, ShapesOnly(), torch.bfloat16, torch.device("meta"), MOST_BATCH_TOKENS)
    compile_ahead(model, row_counts(gemm.table().keys(), MOST_BATCH_TOKENS))


def variants_of(configs: Iterable[ModelConfig]) -> dict[str, CompiledKernel]:
    """Every variant that servers of these models ask for, compiled, by `prebuilt.name_of`.

    Raises:
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    compiled: dict[str, CompiledKernel] = {}

    def compile_once(source: ASTSource, options: Any) -> CompiledKernel:
        name = prebuilt.name_of(source, options)
        if name not in compiled:
            compiled[name] = triton.compile(source, options=options.__dict__)
        return compiled[name]

    driver.set_active(HopperDriver())
    with patch.object(prebuilt, "find", compile_once):
        for config in configs:
            for with_products, with_stack in ((True, True), (True, False), (False, False)):
                with hopper(with_products, with_stack):
                    ask_for_kernels(config)
    return compiled


def build(configs: Iterable[ModelConfig], out: Path) -> int:
    """Replace what `out` holds of Triton by the variants of these models; how many there are."""
    folder, partial = out / prebuilt.SUBFOLDER, out / f".{prebuilt.SUBFOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    variants = variants_of(configs)
    for name, kernel in variants.items():
        prebuilt.write(partial, kernel, name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return len(variants)


def _nothing(*_: object) -> None:
    """In the place of what enqueues, or finds, a kernel that is not Triton's."""


def _fused_product(kernel: ProductKernel) -> fused.FusedGemm:
    return fused.FusedGemm(kernel, _nothing, _H200_PROCESSORS)


def main(argv: Sequence[str] | None = None) -> int:
    """Build; 0 if it went well."""
    parser = argparse.ArgumentParser(prog="python -m rose.aot.build_triton", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=default_output(), help="folder to write (default: %(default)s)"
    )
    names = sorted(path.name for path in PRESETS.iterdir() if path.is_dir())
    parser.add_argument("--preset", action="append", choices=names, help="only this model; repeatable")
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    count = build([load_config(PRESETS / name) for name in arguments.preset or names], arguments.out)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{arguments.out / prebuilt.SUBFOLDER}: {count} variants, {seconds:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
