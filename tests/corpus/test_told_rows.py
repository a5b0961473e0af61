"""What a job tells the bar as it goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.corpus.commits import Outcome
from gateway.corpus.driver import Work, run_job
from gateway.corpus.local import run_here
from gateway.corpus.options import CorpusOptions
from tests.corpus.jobs import TOKENIZER, fake_model, text_of, write_parquet
from tests.corpus.test_bad_input import PickyEngine


def test_rows_count_as_they_are_embedded_and_each_once(tmp_path: Path) -> None:
    """Rejected ones too: a text that is not there, one that is too long, one that no step takes."""
    texts = [*map(text_of, range(600)), None, "x" * 1000, "~"]
    source = write_parquet(tmp_path / "in.parquet", {"text": texts})
    told: list[tuple[int, int]] = []

    def run(work: Work, done: Callable[[Outcome], None], _: Callable[[int, int], None]) -> None:
        run_here(work, done, lambda rows, tokens: told.append((rows, tokens)))

    options = CorpusOptions(str(source), str(tmp_path / "out"))
    model = fake_model(PickyEngine(int(TOKENIZER.encode(["~"])[0][1]), fails=True))
    summary, _ = run_job(options, model, "test", run, 1)
    assert (summary.rows_out, summary.rejected) == (600, 3)
    assert sum(rows for rows, _ in told) == 603
    assert sum(tokens for _, tokens in told) == summary.tokens
    assert max(rows for rows, _ in told) <= 128, "one window has them all"
