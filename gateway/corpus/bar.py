"""The progress bar on stderr; nothing where that is no terminal."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm

_FORMAT = "{percentage:3.0f}%|{bar}| {n:,}/{total:,} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Bar:
    """Rows done of all, rows/s, the time left, and tokens/s of each worker."""

    def __init__(self, rows: int, done: int, workers: int) -> None:
        """rows: of the job. done: of them, by earlier runs. workers: engines that share the tokens."""
        self._bar = tqdm(
            total=rows,
            initial=done,
            unit=" rows",
            disable=None,
            smoothing=0.05,
            miniters=1,  # else it guesses how often to look, and a slower part is shown late
            bar_format=_FORMAT,
        )
        self._workers = workers
        self._tokens = 0

    def advance(self, rows: int, tokens: int) -> None:
        """So many more are done."""
        self._tokens += tokens
        elapsed_s = self._bar.format_dict["elapsed"] if not self._bar.disable else 0.0
        if elapsed_s > 0:
            rate = self._tokens / elapsed_s / self._workers
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s a worker", refresh=False)
        self._bar.update(rows)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
