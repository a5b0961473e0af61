"""A job from its options to its summary; how shards are run is the caller's: here, or by a cluster."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.corpus import duplicates
from gateway.corpus.bar import Bar
from gateway.corpus.commits import TABLE, Outcome, committed, undo
from gateway.corpus.errors import OTHERWISE, CorpusError, RefusedError
from gateway.corpus.inputs import Inputs, find_inputs
from gateway.corpus.job import changes, file_changes, forget_job, job_of, load_job, save_job
from gateway.corpus.lock import Lock
from gateway.corpus.options import CorpusOptions, ModelSource
from gateway.corpus.plan import Shard, forget_plan, load_plan, save_plan, split
from gateway.corpus.rows import Columns
from gateway.corpus.signals import Stopped
from gateway.corpus.store import Store
from gateway.corpus.summary import Summary, summarise
from rose.errors import EngineDeadError, EngineError
from scheduler.errors import EngineDead, SchedulerError

if TYPE_CHECKING:
    from gateway.corpus.lance_table import LanceTable

FAILED, ENGINE_DEAD = 1, 3


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do. run: a word that marks what this run does. id_type: of OUT's ids, or None."""

    options: CorpusOptions
    model: ModelSource
    shards: Sequence[Shard]
    id_type: Any
    run: str


# Runs shards; tells each outcome, and rows and tokens as they are embedded.
Runner = Callable[[Work, Callable[[Outcome], None], Callable[[int, int], None]], None]


def run_job(
    options: CorpusOptions, model: ModelSource, version: str, runner: Runner, workers: int
) -> tuple[Summary, int]:
    """Do what is missing of the job; what became of it, and the exit status. workers: engines of the runner.

    Raises:
        CorpusError: it cannot be begun; see the subclasses.
    """
    started_s = time.perf_counter()
    store, columns = Store(options.out), Columns(options.text_column, options.id_column)
    table = _table_of(options)
    inputs, run = find_inputs(options.source, store), secrets.token_hex(6)
    with Lock(store, run):
        store.sweep()
        shards = _planned(options, job_of(options, model, version), inputs, store)
        done = committed(store, shards)
        missing = [shard for shard in shards if shard.index not in done or done[shard.index].damage]
        finished = sum(shard.rows for shard in shards) - sum(shard.rows for shard in missing)
        work = Work(options, model, missing, inputs.id_type(columns), run)
        reason, status = "", 0
        if missing:
            with Bar(sum(shard.rows for shard in shards), finished, workers) as bar:
                reason, status = _run(work, runner, done, bar)
        if status:
            done = committed(store, shards)  # one may have been written as the end came
        if table is not None and len(done) == len(shards) and not status:
            reason, status = _table(table, store, shards, done)
        again = None if status else _count_duplicates(options, store, shards, done, table)
        seconds = time.perf_counter() - started_s
        summary = summarise(
            shards,
            done,
            run,
            files=len(inputs.files),
            other_files=inputs.others,
            seconds=seconds,
            workers=workers,
            duplicate_ids=again,
            reason=reason,
        )
        return summary, status or (0 if summary.status == "complete" and summary.balanced else FAILED)


def _run(work: Work, runner: Runner, done: dict[int, Outcome], bar: Bar) -> tuple[str, int]:
    """Why it ended early, and the status for it; "" and 0 if it did not."""
    try:
        runner(work, lambda outcome: done.update({outcome.shard: outcome}), bar.advance)
    except Stopped as stopped:
        return str(stopped), 128 + stopped.number
    except (EngineDead, EngineDeadError) as error:
        return f"the engine is dead: {error}", ENGINE_DEAD
    except (CorpusError, SchedulerError, EngineError) as error:
        return str(error), FAILED
    return "", 0


def _count_duplicates(
    options: CorpusOptions,
    store: Store,
    shards: Sequence[Shard],
    done: dict[int, Outcome],
    table: LanceTable | None,
) -> int | None:
    if options.id_column is None or options.format == "none" or not shards:
        return None
    rows = sum(outcome.rows for outcome in done.values())

    def hashes() -> Iterator[duplicates.UInt64]:
        return duplicates.in_parts(store, shards) if table is None else duplicates.in_table(table.ids())

    return duplicates.count_duplicates(hashes, rows)


def _table_of(options: CorpusOptions) -> LanceTable | None:
    if options.format != "lance":
        return None
    from gateway.corpus.lance_table import LanceTable

    return LanceTable(options.out)


def _table(
    table: LanceTable, store: Store, shards: Sequence[Shard], done: dict[int, Outcome]
) -> tuple[str, int]:
    """Make what all shards have written a table; why it could not be, and the status for it."""
    try:
        table.commit(store, [done[shard.index] for shard in shards])
    except CorpusError as error:
        return str(error), FAILED
    return "", 0


def _planned(options: CorpusOptions, job: dict[str, Any], inputs: Inputs, store: Store) -> list[Shard]:
    """The shards of the job in OUT, or of a new one.

    Raises:
        RefusedError: OUT holds another job, or a file of IN cannot be opened or read.
    """
    if not options.redo:
        before, plan = load_job(store), load_plan(store)
        if before is None or plan is None:
            _refuse_files(store)
        else:
            shards, files = plan
            found = [*changes(before, job), *file_changes(files, inputs.files)]
            if not found:
                return shards
            if committed(store, shards):
                raise RefusedError(
                    f"{store.url} holds a job with other settings: {'; '.join(found)}; {OTHERWISE}"
                )
    planned = _plan(options, inputs)
    undo(store)
    forget_plan(store)
    forget_job(store)
    save_job(store, job)
    save_plan(store, planned, inputs.files)
    return planned


def _refuse_files(store: Store) -> None:
    """Of a folder without a job: what is there is not ours, and readers of OUT would take it for a part."""
    for name in sorted(store.sizes("")):
        if name.endswith(".parquet"):
            raise RefusedError(f"{store.url} has {name} and no job that it is of; {OTHERWISE}")
    if store.sizes(f"{TABLE}/_versions"):
        raise RefusedError(f"{store.url} has {TABLE} and no job that it is of; {OTHERWISE}")


def _plan(options: CorpusOptions, inputs: Inputs) -> list[Shard]:
    columns = Columns(options.text_column, options.id_column)
    pieces = inputs.pieces(columns, options.shard_rows, options.shard_bytes)
    inputs.id_type(columns)
    if options.refuse_duplicate_ids:
        _refuse_duplicates(inputs, pieces, columns)
    return split(pieces, options.shard_rows, options.shard_bytes)


def _refuse_duplicates(inputs: Inputs, pieces: Sequence[Any], columns: Columns) -> None:
    rows = sum(piece.rows for piece in pieces)
    again = duplicates.count_duplicates(lambda: duplicates.in_inputs(inputs, pieces, columns), rows)
    if again:
        raise RefusedError(
            f"{again} of {rows} rows have an id ({columns.id!r}) that a row before them has; nothing was"
            " embedded (--refuse-duplicate-ids)"
        )
