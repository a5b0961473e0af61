"""`server.py corpus`: runs a job and says what became of it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gateway.corpus import signals
from gateway.corpus.driver import FAILED, run_job
from gateway.corpus.errors import CorpusError
from gateway.corpus.local import run_here
from gateway.corpus.locations import shown
from gateway.corpus.options import CorpusOptions, ModelSource, RayOptions
from gateway.corpus.store import JOB
from gateway.corpus.summary import Summary


def run(options: CorpusOptions, ray: RayOptions | None, model: ModelSource, version: str) -> int:
    """Do the job; its summary in JSON goes to stdout, one line for people to stderr.

    The status: 0 when all rows have a vector or are rejected, 1 when the job failed or some of IN could not
    be read, 3 when the engine died, 128 + N after a signal.
    """
    try:
        with signals.raised():
            if ray is None:
                summary, status = run_job(options, model, version, run_here, workers=1)
            else:
                from gateway.corpus.ray_pool import RayPool

                with RayPool(ray) as pool:
                    summary, status = run_job(options, model, version, pool.run, pool.actors)
    except (CorpusError, OSError) as error:
        _say(f"error: {' '.join(str(error).split())}")
        return FAILED
    except signals.Stopped as stopped:
        _say(f"error: {stopped}")
        return 128 + stopped.number
    written = msgspec.json.format(msgspec.json.encode(summary)) + b"\n"
    sys.stdout.write(written.decode())
    sys.stdout.flush()
    _say(_sentence(summary, options.out))
    if options.summary is not None:
        try:
            Path(options.summary).write_bytes(written)
        except OSError as error:
            _say(f"error: --summary: {error}")
            return status or FAILED
    return status


def _sentence(summary: Summary, out: str) -> str:
    why = f": {summary.reason}" if summary.reason else ""
    left = f", {summary.rows_left} are left" if summary.rows_left else ""
    reasons = f" (why: {shown(out).rstrip('/')}/{JOB}/rejected)" if summary.rejected else ""
    others = f"; {summary.other_files} files of other kinds were passed over" if summary.other_files else ""
    return (
        f"{summary.status}{why}; {summary.rows_out} of {summary.rows_in} rows have a vector,"
        f" {summary.rejected} are rejected{reasons}{left}{others}"
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
