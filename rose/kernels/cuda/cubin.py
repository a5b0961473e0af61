"""The files that hold the compiled kernels of this folder's sources, and how they are known to fit them.

Free of torch, so that a build needs none of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.aot.manifest import sha256_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A file of kernels, compiled into one cubin. path: the .cu; it may include the headers beside it."""

    path: Path

    @property
    def cubin_name(self) -> str:
        """Of the compiled file, such as "skinny-gemm-sm_90a.cubin"."""
        return f"{self.path.stem.replace('_', '-')}-sm_90a.cubin"

    @property
    def record_name(self) -> str:
        """Of what describes the compiled file."""
        return self.cubin_name.replace(".cubin", ".json")

    def sha256(self) -> str:
        """Of the source and all headers beside it."""
        files = [self.path, *sorted(self.path.parent.glob("*.cuh"))]
        return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


SKINNY_GEMM = CudaSource(Path(__file__).with_name("skinny_gemm.cu"))
DECODER_STACK = CudaSource(Path(__file__).with_name("decoder_stack.cu"))
DECODER_WIDE = CudaSource(Path(__file__).with_name("decoder_wide.cu"))
ENCODER_STACK = CudaSource(Path(__file__).with_name("encoder_stack.cu"))
ENCODER_WIDE = CudaSource(Path(__file__).with_name("encoder_wide.cu"))
CHAINED_ATTENTION = CudaSource(Path(__file__).with_name("chained_attention.cu"))
RESIDUAL_PRODUCT = CudaSource(Path(__file__).with_name("residual_product.cu"))
ROTARY_PRODUCT = CudaSource(Path(__file__).with_name("rotary_product.cu"))
SOURCES = (
    SKINNY_GEMM, DECODER_STACK, DECODER_WIDE, ENCODER_STACK, ENCODER_WIDE, CHAINED_ATTENTION,
    RESIDUAL_PRODUCT, ROTARY_PRODUCT,
)  # fmt: skip


def write_record(source: CudaSource, folder: Path, versions: Mapping[str, str]) -> None:
    """Describe the cubin in `folder`: what it was built from, and itself."""
    record = {
        "source_sha256": source.sha256(),
        "sha256": sha256_of(folder / source.cubin_name),
        "versions": dict(versions),
    }
    (folder / source.record_name).write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def find_cubin(source: CudaSource, folders: Iterable[Path]) -> Path | None:
    """The first intact cubin that was built from `source`; None, with a log line a rejected file."""
    for folder in folders:
        path, record_path = folder / source.cubin_name, folder / source.record_name
        try:
            if not record_path.is_file():
                continue
            record = json.loads(record_path.read_text("utf-8"))
            built_from, sha256 = record["source_sha256"], record["sha256"]
            intact = path.is_file() and sha256_of(path) == sha256
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignored %s: %s: %s", record_path, type(error).__name__, error)
            continue
        if built_from != source.sha256():
            log.warning(
                "ignored %s: built from another version of %s; build it again", path, source.path.name
            )
        elif not intact:
            log.warning("ignored %s: it is not the file that %s describes", path, source.record_name)
        else:
            return path
    return None
