"""One bar for a whole run, with the time left, on stderr and only when that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

FORMAT = "{desc}|{bar}| {n:.1f}/{total} {elapsed}<{remaining}"


class Bar:
    """total: how many cases the run has, counting every round and target."""

    def __init__(self, total: int) -> None:
        # disable=None: tqdm is silent when its file is no terminal.
        self._bar = tqdm(
            total=total,
            unit="case",
            file=sys.stderr,
            disable=None,
            bar_format="{desc}|{bar}| {n:.1f}/{total} {elapsed}<{remaining}",
        )
        self._begun = -1

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def begin(self, name: str) -> None:
        """The next case starts."""
        self._begun += 1
        self._bar.set_description_str(name.ljust(32), refresh=False)
        self.at(0.0)

    def at(self, fraction: float) -> None:
        """How much of the running case is done."""
        self._bar.n = self._begun + min(1.0, fraction)
        self._bar.refresh()
