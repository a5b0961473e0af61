"""Which calls are accepted: possible sequences, and no more of them than may wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rose.batch import EngineInfo, Int32, RaggedIds, TokenOutput
from scheduler.errors import Backlog, QueueFull
from scheduler.metrics import SchedulerMetrics
from scheduler.options import SchedulerOptions

# Retry-after before any step has been measured, and where nothing waits: all is being sent, tokenised or run.
_UNKNOWN_RETRY_S = 1.0


class Waiting(Protocol):
    """What waits, in sequences and tokens."""

    num_seqs: int
    num_tokens: int


class Rate(Protocol):
    """Knows how fast that goes."""

    @property
    def tokens_per_s(self) -> float:
        """Measured; 0 before anything was."""
        ...


def check_job(
    sequences: RaggedIds,
    token_type_ids: Sequence[Int32 | None] | None,
    spans: Sequence[Int32 | None] | None,
    token_outputs: frozenset[TokenOutput],
    info: EngineInfo,
) -> None:
    """Refuse a job that the engine cannot run.

    Raises:
        ValueError: see the checks below.
    """
    check_lengths(sequences, token_type_ids, info.max_batch_tokens)
    if spans is not None:
        check_spans(sequences, spans, info.max_batch_seqs)
    if token_outputs:
        check_token_outputs(sequences, token_outputs, info)


def check_lengths(
    sequences: RaggedIds, token_type_ids: Sequence[Int32 | None] | None, max_tokens: int
) -> None:
    """Refuse sequences of other than 1 to `max_tokens` tokens.

    Raises:
        ValueError: there is no sequence, or one of an impossible length, or types that do not match.
    """
    lengths = sequences.lengths
    if not lengths:
        raise ValueError("a job needs at least one sequence")
    if sequences.flat.ndim != 1:
        raise ValueError(f"sequences of shape {list(sequences.flat.shape)}; a step takes [n]")
    if min(lengths) < 1 or max(lengths) > max_tokens:
        wrong = next(length for length in lengths if not 1 <= length <= max_tokens)
        raise ValueError(f"sequence has {wrong} tokens; a step takes 1 to {max_tokens}")
    if token_type_ids is not None:
        for length, types in zip(lengths, token_type_ids, strict=True):
            if types is not None and len(types) != length:
                raise ValueError(f"{len(types)} token types for a sequence of {length} tokens")


def check_spans(sequences: RaggedIds, spans: Sequence[Int32 | None], max_rows: int) -> None:
    """Refuse sequences with fewer than 1 or more than `max_rows` spans; None: the sequence itself.

    Raises:
        ValueError: spans i32[k, 2] of a sequence are too many or none, or lie outside it.
    """
    for length, own in zip(sequences.lengths, spans, strict=True):
        if own is None:
            continue
        if own.ndim != 2 or own.shape[1] != 2 or not 1 <= len(own) <= max_rows:
            raise ValueError(f"spans of shape {list(own.shape)}; a step takes [1 to {max_rows}, 2]")
        if own.min() < 0 or own.max() > length or (own[:, 0] > own[:, 1]).any():
            raise ValueError(f"spans {own.tolist()} do not lie within a sequence of {length} tokens")


def check_token_outputs(
    sequences: RaggedIds, token_outputs: frozenset[TokenOutput], info: EngineInfo
) -> None:
    """Refuse what the engine does not give of a token, and sequences for which it would be too much.

    Raises:
        ValueError: see above.
    """
    unknown = sorted(kind for kind in token_outputs if kind not in info.token_outputs)
    if unknown:
        raise ValueError(f"the engine gives no {unknown[0]} of a token")
    most = info.most_tokens(token_outputs)
    longest = max(sequences.lengths)
    if longest > most:
        raise ValueError(f"sequence has {longest} tokens; a step gives {', '.join(token_outputs)} of {most}")


def check_room(queue: Waiting, options: SchedulerOptions, cost: Rate, sequences: RaggedIds) -> None:
    """Let a job of `sequences` pass if it fits beside what waits; one of any size does when nothing waits.

    cost: knows the measured rate.

    Raises:
        QueueFull: it does not fit.
    """
    if queue.num_seqs == 0:
        return
    num_tokens, num_seqs = len(sequences.flat), len(sequences)
    fits = queue.num_tokens + num_tokens <= options.max_waiting_tokens
    if fits and queue.num_seqs + num_seqs <= options.max_waiting_seqs:
        return
    backlog = Backlog(queue.num_tokens, queue.num_seqs, options.max_waiting_tokens, options.max_waiting_seqs)
    raise QueueFull(num_tokens, num_seqs, backlog, _drain_s(queue.num_tokens, cost.tokens_per_s))


def drain_s(metrics: SchedulerMetrics) -> float:
    """Seconds until what waits now has been launched, at the measured rate; 1 if there is no telling."""
    return _drain_s(metrics.waiting_tokens, metrics.tokens_per_s)


def _drain_s(waiting_tokens: int, tokens_per_s: float) -> float:
    return waiting_tokens / tokens_per_s if waiting_tokens and tokens_per_s else _UNKNOWN_RETRY_S
