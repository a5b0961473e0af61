"""One replica as the balancer sees it: whether it serves, what is under way there, how fast it is. No I/O."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from gateway.replicas.pace import ChunkTimes, median

# After so many failures in a row a replica gets no more chunks until a probe has found it well.
MAX_FAILURES = 3
# What may be under way at one replica: as much as it does in WINDOW_S, but no fewer tokens than LEAST, and no
# more than MOST. What is more waits in the gateway, where it can still go to whoever is free first.
WINDOW_S, LEAST_WINDOW_TOKENS, FIRST_WINDOW_TOKENS, MOST_WINDOW_TOKENS = 0.25, 512, 8192, 65_536
MAX_CHUNKS = 256
# Chunks by which a replica's pace is known, and what is left of each after the next where sums are kept.
_PACED_CHUNKS, _MEMORY = 9, 0.9
# Added to all times that are compared: how long the fastest chunks take is chance.
_NOISE_S = 0.002
_HALF_LIFE_S = 3.0
# Replicas that a message names.
_MOST_NAMED = 3
# One that takes less than so many times as long as another is as fast.
SAME_PACE = 2.5


class State(enum.Enum):
    """Of a replica; the value is what /metrics and /info call it.

    CONNECTING: never served yet. READY: serves. HALF_OPEN: a probe found it well, and one chunk will show it.
    EJECTED: failed, probed from time to time. REFUSED: it serves something else. LEAVING: no longer listed.
    """

    CONNECTING = "connecting"
    READY = "ready"
    HALF_OPEN = "half_open"
    EJECTED = "ejected"
    REFUSED = "refused"
    LEAVING = "leaving"


class Replica:
    """Changes state in synchronous calls only.

    clock: seconds. times: of the chunks of all replicas. on_change: told after each change of state.

    outstanding_tokens, outstanding_chunks: sent and not ended. reason: why it does not serve. All other
    counters count since the start.
    """

    def __init__(
        self,
        name: str,
        times: ChunkTimes,
        on_change: Callable[[Replica], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state = State.CONNECTING
        self.reason = ""
        self.outstanding_tokens = self.outstanding_chunks = 0
        self.tokens = self.chunks = self.failures = self.ejections = 0
        self._times = times
        self._clock = clock
        self._on_change = on_change
        self._failures_in_a_row = 0
        self._paused_until_s = 0.0
        self._busy_s = self._paced_tokens = 0.0
        self._times_usual: deque[float] = deque(maxlen=_PACED_CHUNKS)
        self._given = 0.0
        self._last_sent_s = self.last_done_s = -inf

    @property
    def in_service(self) -> bool:
        """Whether chunks may go there at all, now or in a moment."""
        return self.state in (State.READY, State.HALF_OPEN)

    @property
    def tokens_per_s(self) -> float:
        """What it does while it has work; 0 if that is unknown."""
        return self._paced_tokens / self._busy_s if self._busy_s else 0.0

    @property
    def window_tokens(self) -> int:
        """How many tokens may be under way there."""
        if not self._busy_s:
            return FIRST_WINDOW_TOKENS
        return min(MOST_WINDOW_TOKENS, max(LEAST_WINDOW_TOKENS, int(WINDOW_S * self.tokens_per_s)))

    @property
    def slowness(self) -> float:
        """How many times as long as usual its chunks take; 1 if that is unknown."""
        return median(self._times_usual) if self._times_usual else 1.0

    def given(self, now_s: float) -> float:
        """Tokens that it was given lately, older ones counting less: among equals who has less is next."""
        return self._given * 0.5 ** ((now_s - self._last_sent_s) / _HALF_LIFE_S) if self._given else 0.0

    def paused_s(self, now_s: float) -> float:
        """Seconds for which it wants nothing."""
        return max(0.0, self._paused_until_s - now_s)

    def has_room(self, num_tokens: int, now_s: float) -> bool:
        """Whether a chunk may go there now; one of any size may if nothing is under way."""
        if not self.in_service or now_s < self._paused_until_s:
            return False
        if self.outstanding_chunks == 0:
            return True
        if self.state is State.HALF_OPEN or self.outstanding_chunks >= MAX_CHUNKS:
            return False
        return self.outstanding_tokens + num_tokens <= self.window_tokens

    def sent(self, num_tokens: int, now_s: float) -> None:
        """A chunk is on its way there."""
        self.outstanding_chunks += 1
        self.outstanding_tokens += num_tokens
        self._given = self.given(now_s) + num_tokens
        self._last_sent_s = now_s

    def done(self, num_tokens: int, sent_s: float, now_s: float) -> None:
        """Its rows have come."""
        self._ended(num_tokens)
        self._failures_in_a_row = 0
        self.chunks += 1
        self.tokens += num_tokens
        self._learn(num_tokens, now_s - max(sent_s, self.last_done_s))
        self.last_done_s = now_s
        if self.state is State.HALF_OPEN:
            self._become(State.READY, "")

    def dropped(self, num_tokens: int) -> None:
        """Nobody wants it any more, or the replica was too busy; that says nothing of its health."""
        self._ended(num_tokens)

    def failed(self, num_tokens: int, reason: str, *, at_once: bool) -> None:
        """It ended in a failure that is the replica's. at_once: one is enough: there is nobody."""
        self._ended(num_tokens)
        self.failures += 1
        self._failures_in_a_row += 1
        if at_once or self.state is State.HALF_OPEN or self._failures_in_a_row >= MAX_FAILURES:
            self.eject(reason)

    def pause(self, seconds: float, now_s: float) -> None:
        """It wants nothing for so long."""
        self._paused_until_s = max(self._paused_until_s, now_s + seconds)

    def admit(self, given: float) -> None:
        """A probe found it well. given: of those that serve already, so that it need not catch up."""
        if self.in_service or self.state is State.LEAVING:
            return
        self._given, self._last_sent_s = given, self._clock()
        self._failures_in_a_row, self._paused_until_s = 0, 0.0
        self._become(State.READY if self.state is State.CONNECTING else State.HALF_OPEN, "")

    def eject(self, reason: str) -> None:
        """No more chunks until a probe has found it well."""
        if self.in_service:
            self.ejections += 1
            self._busy_s = self._paced_tokens = 0.0
            self._times_usual.clear()
            self._become(State.EJECTED, reason)
        elif self.state is not State.LEAVING:
            self.reason = reason

    def refuse(self, reason: str) -> None:
        """It serves something else than we do."""
        if self.state is not State.LEAVING:
            self._become(State.REFUSED, reason)

    def leave(self) -> None:
        """It is no longer listed; what is under way there may end."""
        self._become(State.LEAVING, "no longer listed")

    def _become(self, state: State, reason: str) -> None:
        self.reason = reason
        if state is not self.state:
            self.state = state
            self._on_change(self)

    def _ended(self, num_tokens: int) -> None:
        self.outstanding_chunks -= 1
        self.outstanding_tokens -= num_tokens

    def _learn(self, num_tokens: int, seconds: float) -> None:
        usual_s = self._times.observe(num_tokens, seconds)
        self._times_usual.append((seconds + _NOISE_S) / (usual_s + _NOISE_S))
        self._busy_s = _MEMORY * self._busy_s + seconds
        self._paced_tokens = _MEMORY * self._paced_tokens + num_tokens

    def __repr__(self) -> str:
        return (
            f"<Replica {self.name} {self.state.value}, {self.outstanding_tokens} tokens in"
            f" {self.outstanding_chunks} chunks>"
        )


def why_none_serves(replicas: Sequence[Replica]) -> str:
    """What is said where all of these are out of service."""
    named = [f"{replica.name}: {replica.reason or replica.state.value}" for replica in replicas[:_MOST_NAMED]]
    more = [f"{len(replicas) - _MOST_NAMED} more"] if len(replicas) > _MOST_NAMED else []
    return f"no replica serves ({'; '.join([*named, *more]) or 'there is none'})"
