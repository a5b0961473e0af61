"""The batches that were launched and are not finished; the engine runs them one after another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rose.batch import NO_TOKEN_OUTPUTS, BatchResult, EngineInfo, LazyTensor, TokenOutput
from rose.errors import StepError
from scheduler.job import Run


@dataclass(slots=True, eq=False)
class Step:
    """One launched batch. started_s: when the engine began with it, on the batcher's clock.

    num_rows, token_outputs: of its result. alone: launched when nothing else ran, so that it began at once.
    """

    runs: list[Run]
    num_seqs: int
    num_tokens: int
    num_rows: int
    lazy: LazyTensor
    started_s: float
    predicted_s: float
    alone: bool = True
    token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS

    def check(self, result: BatchResult, info: EngineInfo) -> None:
        """See whether `result` has all that the batch asked for, in the shapes that the engine's `info` says.

        Raises:
            StepError: it has not.
        """
        if len(result.vectors) != self.num_rows:
            raise StepError(f"{len(result.vectors)} vectors for {self.num_rows} sequences or spans")
        for rows in (result.vectors, result.int8):
            if rows is not None and rows.shape != (self.num_rows, info.dimensions):
                raise StepError(f"rows of shape {rows.shape}; wanted {self.num_rows} of {info.dimensions}")
        for kind in self.token_outputs:
            count = len(result.tokens.get(kind, ()))
            if count != self.num_tokens:
                raise StepError(f"{kind} of {count} tokens; the batch has {self.num_tokens}")

    def __repr__(self) -> str:
        return f"<Step {self.num_seqs} seqs, {self.num_tokens} tokens>"


class InFlight:
    """Steps in the order of their launch. `head` runs; the others wait for it on the device."""

    __slots__ = ("_predicted_s", "_steps")

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._predicted_s = 0.0

    @property
    def head(self) -> Step:
        """The oldest step: the one that runs."""
        return self._steps[0]

    @property
    def end_s(self) -> float:
        """When all of them are predicted to be done."""
        return self._steps[0].started_s + self._predicted_s

    @property
    def num_seqs(self) -> int:
        """Sequences in all steps."""
        return sum(step.num_seqs for step in self._steps)

    def add(self, step: Step) -> None:
        """A step was launched behind the others."""
        step.alone = not self._steps
        self._steps.append(step)
        self._predicted_s += step.predicted_s

    def finish(self, now_s: float) -> Step:
        """The head is done, and the engine goes on with the next."""
        step = self._steps.popleft()
        self._predicted_s = sum(later.predicted_s for later in self._steps)
        if self._steps:
            self._steps[0].started_s = now_s
        return step

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"<InFlight {list(self._steps)}>"
