"""What lies in a folder of kernels built ahead of time, and how to check it.

A folder holds one shared object a kernel and `manifest.json`, written by `python -m rose.aot`.
Free of torch, so that a build and its tests need none of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

MANIFEST_NAME = "manifest.json"
FORMAT = 1


class ManifestError(Exception):
    """A manifest that cannot be read. The message is one line."""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One kernel of a folder.

    file: name of the shared object in the folder. kernel: "fa4", "flashinfer-fa3", "flashinfer-fa3-fp8",
    "flashinfer-fa2" or the name of a product with a fused epilogue (rose.aot.products).
    head_dim: None for a product.
    group: query heads a key/value head (compiled into fa4); None if any. causal: None if both.
    dtype: of what it writes, as in torch, "bfloat16". arch: as nvcc names it, "sm_90a".
    versions: of the packages and the compiler it was built with. sha256, size_bytes: of the file.
    """

    file: str
    kernel: str
    head_dim: int | None
    group: int | None
    causal: bool | None
    dtype: str
    arch: str
    versions: Mapping[str, str]
    sha256: str
    size_bytes: int


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(folder: Path) -> list[KernelRecord]:
    """Records of `folder`, in the order of the file.

    Raises:
        ManifestError: the file is missing, no JSON, of another format, or lacks a field.
    """
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ManifestError(f"{path}: format {document['format']}, this version reads {FORMAT}")
        return [_record(entry) for entry in document["kernels"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: {type(error).__name__}: {error}") from error


def write_manifest(folder: Path, records: Iterable[KernelRecord]) -> None:
    """Replace the manifest of `folder` in one step; records are sorted by file name."""
    ordered = sorted(records, key=lambda record: record.file)
    document = {"format": FORMAT, "kernels": [asdict(record) for record in ordered]}
    partial = folder / f".{MANIFEST_NAME}.partial"
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(folder / MANIFEST_NAME)


def merge(old: Iterable[KernelRecord], new: KernelRecord) -> list[KernelRecord]:
    """`old` with `new` in the place of the record of the same file, if any."""
    return [record for record in old if record.file != new.file] + [new]


def _record(entry: Mapping[str, object]) -> KernelRecord:
    wanted = [field.name for field in fields(KernelRecord)]
    missing = [name for name in wanted if name not in entry]
    if missing:
        raise ManifestError(f"record {entry.get('file')!r} lacks {', '.join(missing)}")
    record = KernelRecord(**{name: entry[name] for name in wanted})  # type: ignore[arg-type]
    if Path(record.file).name != record.file:
        raise ManifestError(f"record {record.file!r} is not a plain file name")
    return record
