"""A window's texts into vectors: tokenised in threads, sorted by length, run by the scheduler.

The same steps as a request's, by the same functions; but a row at fault is rejected alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.corpus.errors import CorpusError
from gateway.corpus.gate import Gate
from gateway.corpus.options import CorpusOptions
from gateway.corpus.parts import DTYPES
from gateway.corpus.windows import Window
from gateway.dtypes import cast, read_dtype
from gateway.errors import ApiError
from gateway.pipeline import Scheduler, max_tokens, vectors_of
from gateway.prompts import Prompts
from gateway.tokenization.pool import TokenizerPool
from rose.batch import EngineInfo, Int32
from scheduler.errors import StepFailed

# Of one job of the scheduler, which joins jobs to batches as it sees fit.
_JOB_SEQS, _JOB_TOKENS = 128, 8192


class Embedder:
    """Turns windows into vectors, several at once.

    gate: bounds what waits for the device; enough does to keep it busy. tell: called with rows that got their
    values or a reason, and their tokens.
    """

    def __init__(
        self,
        options: CorpusOptions,
        info: EngineInfo,
        tokenizer: TokenizerPool,
        scheduler: Scheduler,
        gate: Gate,
        tell: Callable[[int, int], None],
    ) -> None:
        """Raises CorpusError for a model that gives no vectors, or options that it does not take."""
        if info.task != "embed":
            raise CorpusError(f"{info.model} gives no vectors; it is a model that scores")
        self._truncate = options.truncate
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._gate = gate
        self._tell = tell
        self._vocab_size = info.vocab_size
        self._max_tokens = max_tokens(info)
        self._normalize = info.normalize if options.normalize is None else options.normalize
        self._dtype = DTYPES[options.vectors]
        self.dimensions = _dimensions(options, info)
        try:
            self.prompt = Prompts(info).choose(options.prompt, options.prompt_name, options.input_type)
            read_dtype(self._dtype.value, self.dimensions, "--vectors")
        except ApiError as error:
            raise CorpusError(error.message) from error

    async def embed(self, window: Window) -> Window:
        """Fill the window's values and reasons; its texts are given up.

        Raises:
            scheduler.errors.EngineDead: the engine can run no further step.
        """
        sequences = await self._sequences(window)
        window.texts = []
        window.tokens = sum(map(len, sequences.values()))
        self._tell(window.size - len(sequences), 0)
        jobs = [self._run(window, sequences, places) for places in _jobs(sequences)]
        await asyncio.gather(*jobs)
        return window

    async def _sequences(self, window: Window) -> dict[int, Int32]:
        """Ids of each row that fits, by its place; the others get a reason."""
        texts = [self.prompt + text for text in window.texts] if self.prompt else window.texts
        if not texts:
            return {}
        # One more than fits tells that a text is too long, however long it is.
        most = self._max_tokens + (self._truncate == "off")
        encoded: Sequence[Int32] = await self._tokenizer.encode(texts, most, ends=self._truncate == "start")
        template = self._tokenizer.special_tokens
        sequences: dict[int, Int32] = {}
        if self._truncate != "off":
            keep_end = self._truncate == "start"
            encoded = [template.truncate(ids, self._max_tokens, keep_end=keep_end) for ids in encoded]
        for place, ids in enumerate(encoded):
            reason = self._fault(ids)
            if reason is None:
                sequences[place] = ids
            else:
                window.reasons[place] = reason
        return sequences

    def _fault(self, ids: Int32) -> str | None:
        if len(ids) > self._max_tokens:
            return f"text has more than {self._max_tokens} tokens"
        if len(ids) == 0:
            return "text has no tokens"
        if self._tokenizer.vocab_size > self._vocab_size and int(ids.max()) >= self._vocab_size:
            return f"a token is {int(ids.max())}; the model's ids are below {self._vocab_size}"
        return None

    async def _run(self, window: Window, sequences: dict[int, Int32], places: list[int]) -> None:
        tokens = sum(len(sequences[place]) for place in places)
        async with self._gate.held(tokens):
            await self._place(window, sequences, places)

    async def _place(self, window: Window, sequences: dict[int, Int32], places: list[int]) -> None:
        """Run rows and put their values into the window; halves of them where one is at fault."""
        try:
            result = await self._scheduler.run([sequences[place] for place in places])
            values = cast(vectors_of(result, self.dimensions, self._normalize), result.int8, self._dtype)
        except (StepFailed, ApiError) as error:
            if len(places) == 1:
                window.reasons[places[0]] = str(error)
                self._tell(1, len(sequences[places[0]]))
                return
            middle = len(places) // 2
            await self._place(window, sequences, places[:middle])
            await self._place(window, sequences, places[middle:])
            return
        if window.values is None:
            window.values = _empty(len(window.rows), values)
        window.values[places] = values
        self._tell(len(places), sum(len(sequences[place]) for place in places))


def _empty(rows: int, like: NDArray[Any]) -> NDArray[Any]:
    return np.zeros((rows, like.shape[1]), like.dtype)


def _jobs(sequences: dict[int, Int32]) -> Iterator[list[int]]:
    """Places in jobs, the longest sequences first: they show at once whether memory suffices."""
    places: list[int] = []
    tokens = 0
    for place in sorted(sequences, key=lambda place: len(sequences[place]), reverse=True):
        count = len(sequences[place])
        if places and (len(places) == _JOB_SEQS or tokens + count > _JOB_TOKENS):
            yield places
            places, tokens = [], 0
        places.append(place)
        tokens += count
    if places:
        yield places


def _dimensions(options: CorpusOptions, info: EngineInfo) -> int:
    dimensions = info.dimensions if options.dimensions is None else options.dimensions
    if not 1 <= dimensions <= info.dimensions:
        raise CorpusError(f"--dimensions is {dimensions}; {info.model} takes 1 to {info.dimensions}")
    return dimensions
