"""What became of a job, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.corpus.commits import Outcome
from gateway.corpus.plan import Shard

_MOST_NAMED = 100


class Summary(msgspec.Struct, frozen=True):
    """Of the whole job, rows of earlier runs too; tokens, seconds and rates are this run's.

    status: "complete", "damaged" (all done, but some of IN could not be read) or "incomplete".
    files: of IN. other_files: that are there, too, but of no kind that is read.
    rows_in: that IN has. rows_out: with vectors. rejected: in OUT/_corpus/rejected.
    rows_left: of shards that are not done.
    damaged: what could not be read, of the first so many shards.
    duplicate_ids: rows whose id a row before them has; None: not counted.
    """

    status: str
    reason: str
    files: int
    other_files: int
    rows_in: int
    rows_out: int
    rejected: int
    rows_left: int
    shards: int
    shards_done: int
    shards_of_this_run: int
    output_bytes: int
    damaged: dict[int, str]
    duplicate_ids: int | None
    tokens: int
    seconds: float
    rows_per_s: float
    tokens_per_s: float
    workers: int

    @property
    def balanced(self) -> bool:
        """Whether no row is lost: each has a vector, is rejected, or is of a shard that is not done."""
        return self.rows_in == self.rows_out + self.rejected + self.rows_left


def summarise(
    shards: Sequence[Shard],
    done: Mapping[int, Outcome],
    run: str,
    *,
    files: int,
    other_files: int,
    seconds: float,
    workers: int,
    duplicate_ids: int | None,
    reason: str = "",
) -> Summary:
    """The summary of a job of these shards, of which some are done. run: this run's word."""
    own = [outcome for outcome in done.values() if outcome.run == run]
    damaged = {index: outcome.damage for index, outcome in sorted(done.items()) if outcome.damage}
    left = [shard for shard in shards if shard.index not in done]
    rows, tokens = (sum(getattr(outcome, name) for outcome in own) for name in ("rows", "tokens"))
    return Summary(
        status="incomplete" if left or reason else "damaged" if damaged else "complete",
        reason=reason,
        files=files,
        other_files=other_files,
        rows_in=sum(shard.rows for shard in shards),
        rows_out=sum(outcome.rows for outcome in done.values()),
        rejected=sum(outcome.rejected for outcome in done.values()),
        rows_left=sum(shard.rows for shard in left),
        shards=len(shards),
        shards_done=len(done),
        shards_of_this_run=len(own),
        output_bytes=sum(outcome.nbytes for outcome in done.values()),
        damaged=dict(list(damaged.items())[:_MOST_NAMED]),
        duplicate_ids=duplicate_ids,
        tokens=tokens,
        seconds=round(seconds, 3),
        rows_per_s=round(rows / seconds, 1) if seconds > 0 else 0.0,
        tokens_per_s=round(tokens / seconds, 1) if seconds > 0 else 0.0,
        workers=workers,
    )
