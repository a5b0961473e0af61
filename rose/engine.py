"""From a model folder and options to a running engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rose.attention.backends import load_backends
from rose.batch import Engine, EngineInfo
from rose.buckets import token_bucket
from rose.config import ModelConfig, load_config
from rose.cpu_engine import CpuEngine
from rose.engine_options import DEFAULT_BATCH_TOKENS
from rose.engine_options import EngineOptions as EngineOptions
from rose.errors import EngineError, ModelLoadError, OutOfMemoryError
from rose.layers.fp8_linear import CAPABILITY
from rose.layers.fp8_weights import FP8_ARCHITECTURES, DequantizedWeights, Fp8Weights
from rose.limits import StepLimits
from rose.models.registry import build_model
from rose.progress import shown
from rose.step_errors import as_engine_error
from rose.step_size import device_batch_tokens
from rose.weights import dummy_weights, open_weights, stored_bytes

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend
    from rose.models.registry import Model
    from rose.weights import WeightSource

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Trained in bfloat16: their residual streams leave float16's range (65504) and vectors become NaN.
# Source: reports on pplx-embed's weights; Gemma's activations reach 8e5. Llama and Qwen2 are built alike.
_OVERFLOW_FLOAT16 = frozenset({"qwen3", "qwen2", "llama", "gemma3"})


@dataclass(frozen=True, slots=True)
class _Settled:
    """What the options come to for this model on this machine.

    fp8: whether products of layers are. dtype: of all else.
    """

    dtype: torch.dtype
    fp8: bool
    device: torch.device
    max_batch_tokens: int
    max_model_len: int
    max_batch_seqs: int
    max_token_bytes: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What both kinds of engine are made of."""

    model: Model
    backends: Mapping[str, AttentionBackend]
    info: EngineInfo
    limits: StepLimits


def load_engine(
    folder: Path, options: EngineOptions, *, dummy: bool, model_name: str, pickles: bool = True
) -> Engine:
    """Load the model in `folder` and start an engine for it; blocks for seconds.

    dummy: seeded random weights instead of the folder's. model_name: what EngineInfo says.
    pickles: False: weights in one are refused.

    Raises:
        ModelLoadError: the folder, the options or the device do not allow it.
    """
    config = load_config(folder)
    device = _device(options.device)
    # RuntimeError is what torch says nearly everything with, CUDA's errors and the want of memory among them.
    try:
        settled = _settled(options, config, device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        stored = dummy_weights(config, options.seed, device) if dummy else _stored(folder, config, pickles)
        with shown(stored, None if dummy else stored_bytes(folder)) as read:
            weights, max_tokens = _weights(read, config, settled), token_bucket(settled.max_batch_tokens)
            model = build_model(config, weights, settled.dtype, device, max_tokens)
        backends = load_backends(model.attention_spec)
        info = _info(model_name, config, settled, tuple(backends))
        return _start(_Loaded(model, backends, info, _limits(info, config)), options, device)
    except (RuntimeError, MemoryError, OSError, EngineError) as error:
        log.debug("%s cannot start on %s", model_name, device, exc_info=True)
        raise ModelLoadError(f"{model_name} cannot start on {device}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What to say of `error` in one line, with advice if it is of memory."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    line = line.rpartition("CPUAllocator: ")[2]  # torch's place in its source is before that
    if isinstance(as_engine_error(error), OutOfMemoryError):
        return f"{line}; a smaller --max-batch-tokens takes less memory"
    return line


def _settled(options: EngineOptions, config: ModelConfig, device: torch.device) -> _Settled:
    fp8 = _fp8(options.dtype, device, config)
    dtype = _dtype("auto" if fp8 else options.dtype, device, config)
    max_seqs = _max_batch_seqs(options, config)
    lengths = _lengths(options, config, device)
    return _Settled(dtype, fp8, device, *lengths, max_seqs, options.max_token_bytes)


def _stored(folder: Path, config: ModelConfig, pickles: bool) -> WeightSource:
    weights = open_weights(folder, fp8=config.fp8_weights, pickles=pickles)
    weights.root.check_layers(config.num_layers)
    return weights


def _weights(stored: WeightSource, config: ModelConfig, settled: _Settled) -> WeightSource:
    """As the settled precision has the model read them."""
    if settled.fp8:
        return Fp8Weights(stored, settled.device, token_bucket(settled.max_batch_tokens))
    return DequantizedWeights(stored) if config.fp8_weights else stored


def _info(model_name: str, config: ModelConfig, settled: _Settled, attention: tuple[str, ...]) -> EngineInfo:
    scorer = config.scorer
    return EngineInfo(
        model=model_name,
        architecture=config.architecture,
        dtype="fp8" if settled.fp8 else str(settled.dtype).removeprefix("torch."),
        device=_device_name(settled.device),
        dimensions=config.dimensions,
        vocab_size=config.vocab_size,
        max_model_len=settled.max_model_len,
        max_batch_tokens=settled.max_batch_tokens,
        max_batch_seqs=settled.max_batch_seqs,
        whole_job_tokens=0 if settled.device.type == "cpu" else settled.max_batch_tokens,
        pooling=config.pooling,
        normalize=config.normalize,
        has_int8=config.quantizer == "tanh_int8",
        attention=attention,
        chunk_separator=config.chunk_separator,
        type_vocab_size=config.type_vocab_size,
        task=config.task,
        labels=scorer.labels if scorer else (),
        score_template=scorer.template if scorer else "pair",
        prompts=config.prompts,
        default_prompt_name=config.default_prompt_name,
        token_outputs=config.token_outputs,
        max_token_bytes=settled.max_token_bytes,
        unweighted_ids=config.unweighted_ids,
    )


def _limits(info: EngineInfo, config: ModelConfig) -> StepLimits:
    return StepLimits(
        max_batch_tokens=info.max_batch_tokens,
        max_batch_seqs=info.max_batch_seqs,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        type_vocab_size=config.type_vocab_size,
        has_spans=config.pooling == "mean",
        token_bytes={kind: 4 * width for kind, width in info.token_outputs.items()},
        max_token_bytes=info.max_token_bytes,
    )


def _start(loaded: _Loaded, options: EngineOptions, device: torch.device) -> Engine:
    if device.type == "cpu":
        attention = next(iter(loaded.backends.values()))
        threads = options.num_threads or _usable_cpus()
        return CpuEngine(loaded.model, attention, loaded.info, loaded.limits, threads)
    from rose.cuda_engine import cuda_engine  # brings in what a CPU server never needs

    return cuda_engine(loaded.model, loaded.backends, loaded.info, loaded.limits, options)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"--device {name}: not a device; use auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ModelLoadError(f"--device {name}: only cpu and cuda are supported")
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ModelLoadError(f"--device {name}: no such CUDA device here; use --device cpu")
    return torch.device("cuda", index)


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def _dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ModelLoadError(f"--dtype {name}: use auto, {', '.join(_DTYPES)}, fp8")
    if name == "float16" and config.architecture in _OVERFLOW_FLOAT16:
        raise ModelLoadError("--dtype float16: this model overflows in float16; use bfloat16 or float32")
    return _DTYPES[name]


def _fp8(name: str, device: torch.device, config: ModelConfig) -> bool:
    """Whether products are: if that is asked for, or is what the folder holds and the device multiplies."""
    if name not in ("auto", "fp8"):
        return False
    known = config.architecture in FP8_ARCHITECTURES
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
    if name == "auto":
        return config.fp8_weights and known and capable
    if not known:
        families = ", ".join(sorted(FP8_ARCHITECTURES))
        raise ModelLoadError(f"--dtype fp8: not for {config.architecture}; for {families}")
    if device.type == "cuda" and not capable:
        found, least = torch.cuda.get_device_capability(device), "{}.{}".format(*CAPABILITY)
        raise ModelLoadError(
            f"--dtype fp8: {device} is of compute capability {found[0]}.{found[1]}; FP8 products need {least}"
        )
    return True


def _lengths(options: EngineOptions, config: ModelConfig, device: torch.device) -> tuple[int, int]:
    """max_batch_tokens and max_model_len, such that every accepted sequence fits into one step."""
    wanted = options.max_model_len or config.max_model_len
    if wanted > config.max_model_len:
        raise ModelLoadError(f"--max-model-len {wanted}: this model takes {config.max_model_len} tokens")
    if options.max_batch_tokens is None:
        return max(_default_batch_tokens(config, device), wanted), wanted
    if options.max_model_len is not None and wanted > options.max_batch_tokens:
        raise ModelLoadError(
            f"--max-model-len {wanted} exceeds --max-batch-tokens {options.max_batch_tokens}: "
            "a sequence is never split, raise the latter"
        )
    return options.max_batch_tokens, min(wanted, options.max_batch_tokens)


def _default_batch_tokens(config: ModelConfig, device: torch.device) -> int:
    if device.type == "cpu":
        return DEFAULT_BATCH_TOKENS
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device_batch_tokens(config, free_bytes)


def _max_batch_seqs(options: EngineOptions, config: ModelConfig) -> int:
    """As asked for; but rows as long as a vocabulary are copied to the host 32 at a time, some 4 MB."""
    return min(options.max_batch_seqs, 32) if config.task == "sparse" else options.max_batch_seqs


def _usable_cpus() -> int:
    """CPUs this process may run on, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
