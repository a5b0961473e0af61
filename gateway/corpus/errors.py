"""Why a corpus job ends before its time. What is wrong with a row is no error: see rows.Rejected."""

from __future__ import annotations

import errno

# What to do with an OUT that is of another job.
OTHERWISE = "give another OUT, or --redo to embed all of it anew"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CorpusError(Exception):
    """The job cannot start or go on; the message is one line that says what to do."""


class RefusedError(CorpusError):
    """OUT belongs to another job, or to a driver that still runs; or a file of IN cannot be opened or read.

    A plan without the rows of such a file would hold for all reruns: a file's rights are not among what is
    compared. So it is refused before there is one.
    """

    @classmethod
    def unread(cls, path: str, error: Exception) -> RefusedError:
        """What `error` means for the file `path` of IN, whose rows are not known."""
        why = " ".join(str(error).split()) or type(error).__name__
        return cls(f"{path} cannot be opened or read: {why}; run this again once it can be")


class OutputError(CorpusError):
    """OUT cannot be written, or read; finished shards stay, and a rerun goes on from there."""

    @classmethod
    def of(cls, error: OSError, name: str, what: str = "written") -> OutputError:
        """What `error` means for the file `name` of OUT, which cannot be written, read or removed."""
        why = "no room is left" if error.errno in _FULL else str(error) or type(error).__name__
        return cls(f"{name} cannot be {what}: {why}; finished shards stay, a rerun does the others")
