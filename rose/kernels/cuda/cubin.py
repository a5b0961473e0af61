"""The file that holds the compiled kernels of skinny_gemm.cu, and how it is known to fit this source.

Free of torch, so that a build needs none of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from rose.aot.manifest import sha256_of

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("skinny_gemm.cu")
CUBIN_NAME = "skinny-gemm-sm_90a.cubin"
RECORD_NAME = "skinny-gemm-sm_90a.json"


def write_record(folder: Path, versions: Mapping[str, str]) -> None:
    """Describe the cubin in `folder`: what it was built from, and itself."""
    record = {
        "source_sha256": sha256_of(SOURCE),
        "sha256": sha256_of(folder / CUBIN_NAME),
        "versions": dict(versions),
    }
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def find_cubin(folders: Iterable[Path]) -> Path | None:
    """The first intact cubin that was built from this source; None, with a log line a rejected file."""
    for folder in folders:
        path = folder / CUBIN_NAME
        if not (folder / RECORD_NAME).is_file():
            continue
        try:
            record = json.loads((folder / RECORD_NAME).read_text("utf-8"))
            built_from, sha256 = record["source_sha256"], record["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            log.warning("ignored %s: %s: %s", folder / RECORD_NAME, type(error).__name__, error)
            continue
        if built_from != sha256_of(SOURCE):
            log.warning("ignored %s: built from another version of %s; build it again", path, SOURCE.name)
        elif not path.is_file() or sha256_of(path) != sha256:
            log.warning("ignored %s: it is not the file that %s describes", path, RECORD_NAME)
        else:
            return path
    return None
