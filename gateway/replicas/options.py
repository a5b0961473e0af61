"""Which replicas a gateway has; built once by the composition root."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Where engines are, if not in this process.

    urls, file: of other servers; a name is all of its addresses. key: their API key.
    devices: of engines to start, a process each.
    """

    urls: tuple[str, ...] = ()
    file: Path | None = None
    devices: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)

    def describe(self) -> dict[str, object]:
        """The settings as plain values, without the key."""
        file = None if self.file is None else str(self.file)
        return {"urls": self.urls, "file": file, "devices": self.devices, "key": self.key is not None}

    def __post_init__(self) -> None:
        if not (self.urls or self.file or self.devices):
            raise ValueError("--no-engine: name replicas by --replica or --replica-file")
