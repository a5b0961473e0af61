"""Runs one case against one target: when it is warm, when it has been measured, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from time import perf_counter

from loadgen.client import Job
from loadgen.plan import Case, Limits, LoadgenError, Source, Stream, Target
from loadgen.processes import Clients, Failed, Go, Stop, soon_s
from loadgen.recording import Beat, Recording

PREPARE_S = 300.0
# How much longer than its own bounds a client may take before it counts as lost.
GRACE_S = 10.0
# A rate has settled when the second and the last third of a warm-up differ by less than this …
SETTLED = 0.05
# … or by what counting alone makes of it.
SETTLED_COUNT = 1.5
MIN_SETTLED_COUNT = 4

Report = Callable[[float], None]


class ClientLostError(LoadgenError):
    """A client process died or does not answer."""


@dataclass(frozen=True)
class Warmup:
    """What was sent before the measurement. settled: whether the rate had stopped changing."""

    requests: int
    seconds: float
    settled: bool


@dataclass(frozen=True)
class StreamRun:
    """One stream's recordings, one a process, and the window that counts (perf_counter seconds)."""

    stream: Stream
    recordings: tuple[Recording, ...]
    start_s: float
    end_s: float
    warmup: Warmup


@dataclass
class _Running:
    """A client at work."""

    stream: Stream
    pipe: Connection
    beats: list[Beat] = field(default_factory=list)
    recording: Recording | None = None

    @property
    def done(self) -> int:
        return self.beats[-1].done + self.beats[-1].errors if self.beats else 0


@dataclass(frozen=True)
class Setting:
    """What every case of a run shares. keep: answers each client keeps for a check."""

    source: Source
    keep: int = 0


def run_case(
    clients: Clients, case: Case, target: Target, setting: Setting, progress: Report
) -> tuple[StreamRun, ...]:
    """Run `case`; `progress` gets the fraction that is done.

    Raises:
        LoadgenError: a client could not start, or was lost.
    """
    try:
        return _run(clients, case, target, setting, progress)
    except ClientLostError:
        # Those left may still be at the old job; the next case gets new ones.
        clients.discard()
        raise


def _run(
    clients: Clients, case: Case, target: Target, setting: Setting, progress: Report
) -> tuple[StreamRun, ...]:
    running = _start(clients, case, target, setting)
    go_s = soon_s()
    for client in running:
        _tell(client.pipe, Go(go_s))
    if any(stream.is_open for stream in case.streams):
        start_s, end_s = go_s + case.limits.warmup_s, go_s + case.limits.warmup_s + case.limits.max_s
        settled = True
        _follow_schedule(running, end_s, case.limits, progress)
    else:
        start_s, settled = _warm_up(running, go_s, case.limits, progress)
        end_s = _measure(running, start_s, case.limits, progress)
    for client in running:
        if client.recording is None:
            _tell(client.pipe, Stop())
    _collect(running, case.limits)
    progress(1.0)
    return tuple(_stream_run(stream, running, (go_s, start_s, end_s), settled) for stream in case.streams)


def _start(clients: Clients, case: Case, target: Target, setting: Setting) -> list[_Running]:
    limits = case.limits
    streams = [(stream, index) for stream in case.streams for index in range(stream.processes)]
    running = []
    for (stream, index), pipe in zip(streams, clients.pipes(len(streams)), strict=True):
        job = Job(
            target=target,
            stream=stream,
            source=setting.source,
            index=index,
            open_s=limits.warmup_s + limits.max_s,
            max_run_s=limits.max_warmup_s + limits.max_s + GRACE_S,
            timeout_s=limits.timeout_s,
            keep=setting.keep,
        )
        _tell(pipe, job)
        running.append(_Running(stream, pipe))
    failed = [message for client in running if (message := _prepared(client.pipe))]
    if failed:
        for client in running:
            _tell(client.pipe, Stop())
        raise LoadgenError(failed[0])
    return running


def _tell(pipe: Connection, message: object) -> None:
    try:
        pipe.send(message)
    except ConnectionError as error:
        raise ClientLostError("a client process died") from error


def _prepared(pipe: Connection) -> str | None:
    """Why a client cannot start, or None."""
    if not pipe.poll(PREPARE_S):
        raise ClientLostError(f"a client was not ready after {PREPARE_S:g} s")
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise ClientLostError("a client process died while it prepared") from error
    return answer.message if isinstance(answer, Failed) else None


def _receive(running: list[_Running], timeout_s: float) -> None:
    """Take in what the clients say, for at most `timeout_s`; returns at the first news."""
    pipes = {client.pipe: client for client in running if client.recording is None}
    for pipe in wait(list(pipes), timeout_s):
        client = pipes[pipe]  # type: ignore[index]
        try:
            message = client.pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise ClientLostError("a client process died") from error
        if isinstance(message, Beat):
            client.beats.append(message)
        else:
            client.recording = message


def _warm_up(running: list[_Running], go_s: float, limits: Limits, progress: Report) -> tuple[float, bool]:
    """Wait until warm. Returns when that was, and whether the rate had settled."""
    # Before each connection has been answered once, answers are those of a queue that is still filling.
    at_least = max(limits.warmup_requests, sum(client.stream.in_flight for client in running))
    while True:
        _receive(running, 0.1)
        elapsed_s = perf_counter() - go_s
        done = sum(client.done for client in running)
        warm = done >= at_least and elapsed_s >= limits.warmup_s
        settled = warm and _settled(running, go_s)
        if settled or elapsed_s >= limits.max_warmup_s or _all_ended(running):
            return perf_counter(), settled
        progress(0.0)


def _settled(running: list[_Running], go_s: float) -> bool:
    """Whether the second and the last third of the time so far went at the same rate."""
    last_s = min((client.beats[-1].at_s for client in running if client.beats), default=go_s)
    third_s = (last_s - go_s) / 3
    first, second, all_of_it = (_done_by(running, go_s + n * third_s) for n in (1, 2, 3))
    middle, last = second - first, all_of_it - second
    if min(middle, last) < MIN_SETTLED_COUNT:
        return False
    return abs(last - middle) <= max(SETTLED * middle, SETTLED_COUNT)


def _done_by(running: list[_Running], at_s: float) -> int:
    """Answers of all clients up to `at_s`, as far as their beats tell."""
    return sum(max((b.done for b in client.beats if b.at_s <= at_s), default=0) for client in running)


def _measure(running: list[_Running], start_s: float, limits: Limits, progress: Report) -> float:
    """Wait until measured. Returns when that was."""
    while True:
        _receive(running, 0.1)
        elapsed_s = perf_counter() - start_s
        done = _done_since(running, start_s)
        enough = min(done / max(1, limits.requests), elapsed_s / max(1e-9, limits.min_s))
        fraction = max(enough, elapsed_s / limits.max_s)
        if fraction >= 1.0 or _all_ended(running):
            return perf_counter()
        progress(fraction)


def _done_since(running: list[_Running], start_s: float) -> int:
    """Answers and errors after `start_s`, at least: what came before the first beat after it may be older.

    Counted from the beat before it, up to BEAT_S of the warm-up would be taken for measurement, and a case
    that wants 1000 answers for its p99 would end with 970.
    """
    counted = 0
    for client in running:
        first = next((beat for beat in client.beats if beat.at_s >= start_s), None)
        counted += client.done - first.done - first.errors if first is not None else 0
    return counted


def _follow_schedule(running: list[_Running], end_s: float, limits: Limits, progress: Report) -> None:
    """Wait until the open loops have sent everything and been answered, or have been given up."""
    given_up_s = end_s + limits.timeout_s + GRACE_S
    while any(client.recording is None for client in running if client.stream.is_open):
        _receive(running, 0.1)
        left_s = end_s - perf_counter()
        progress(min(1.0, 1.0 - left_s / (limits.warmup_s + limits.max_s)))
        if perf_counter() > given_up_s:
            return


def _all_ended(running: list[_Running]) -> bool:
    return all(client.recording is not None for client in running)


def _collect(running: list[_Running], limits: Limits) -> None:
    deadline_s = perf_counter() + limits.timeout_s + GRACE_S
    while not _all_ended(running):
        if perf_counter() > deadline_s:
            raise ClientLostError("a client did not end in time")
        _receive(running, 0.1)


def _stream_run(
    stream: Stream, running: list[_Running], times: tuple[float, float, float], settled: bool
) -> StreamRun:
    go_s, start_s, end_s = times
    recordings = tuple(c.recording for c in running if c.stream is stream and c.recording is not None)
    sent_before = sum(int((recording.sent_s < start_s).sum()) for recording in recordings)
    return StreamRun(stream, recordings, start_s, end_s, Warmup(sent_before, start_s - go_s, settled))
