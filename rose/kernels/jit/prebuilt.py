"""Triton kernels compiled ahead of time: where a build has written a variant's cubin, nothing is compiled.

Triton's own disk cache cannot be carried to another machine: its key hashes the compiler's 400 MB shared
object, which differs for every version of Python, and its files name each other by absolute path. The key
here holds what decides the machine code: Triton's version, the kernel's source and all it calls, the types,
alignments and constants of its arguments, and the compiler's options, the GPU's architecture among them.
Source: triton 3.6.0, runtime/jit.py (_do_compile), compiler/compiler.py (ASTSource, CompiledKernel).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from rose.aot import folders
from rose.aot.manifest import sha256_of

log = logging.getLogger(__name__)

SUBFOLDER = "triton"
_SHA256 = "cubin_sha256"


class PrebuiltKernel(CompiledKernel):  # type: ignore[misc]
    """A variant that was not compiled here."""


class PrebuiltFunction(JITFunction):  # type: ignore[misc]
    """A kernel whose variants are looked up among what was built, and only compiled where they are not."""

    def _do_compile(  # type: ignore[no-untyped-def]
        self, key, signature, device, constexprs, options, attrs, warmup
    ):
        variants = self.device_caches[device][0]
        found = find(ASTSource(self, signature, constexprs, attrs), options)
        if found is None:
            found = super()._do_compile(key, signature, device, constexprs, options, attrs, warmup)
        # Triton itself keeps one that is being compiled only when that is done, and asks again until then.
        variants.setdefault(key, found)
        return found


def name_of(source: ASTSource, options: Any) -> str:
    """What the files of a variant are called. options: of the backend, parsed."""
    identity = f"{triton.__version__} {source.hash()} {options.hash()}"
    return f"{source.name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def find(source: ASTSource, options: Any) -> PrebuiltKernel | None:
    """The variant that was built for `source`; None if there is none, with a log line if it is damaged."""
    built = _built(folders.default_folders())
    if not built:
        return None
    record = built.get(name_of(source, options))
    if record is None:
        return None
    cubin = record.with_suffix(".cubin")
    try:
        if json.loads(record.read_text("utf-8"))[_SHA256] != sha256_of(cubin):
            raise ValueError(f"{cubin.name} is not the file that it describes")
        return PrebuiltKernel(source, {path.name: str(path) for path in (record, cubin)}, record.stem)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("ignored %s: %s: %s", record, type(error).__name__, error)
        return None


def write(folder: Path, kernel: CompiledKernel, name: str) -> None:
    """Put a compiled variant into `folder`, under the name that `name_of` gave it; the record comes last."""
    metadata = kernel.metadata._asdict() | {_SHA256: hashlib.sha256(kernel.kernel).hexdigest()}
    record = json.dumps(metadata, default=vars).encode()
    for suffix, content in ((".cubin", kernel.kernel), (".json", record)):
        partial = folder / f".{name}{suffix}.partial"
        partial.write_bytes(content)
        partial.replace(folder / f"{name}{suffix}")


@functools.cache
def _built(places: tuple[Path, ...]) -> Mapping[str, Path]:
    """The records of all folders by name; the first folder's, where several have one."""
    found: dict[str, Path] = {}
    for folder in reversed(places):
        found |= {path.stem: path for path in (folder / SUBFOLDER).glob("*.json")}
    return found
