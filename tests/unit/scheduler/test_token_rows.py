"""What tokens give: each job gets its own tokens' rows, and no batch gives more than the engine may."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from rose.batch import BatchResult, EngineInfo, Float32, Int32, RaggedBatch, TokenOutput
from scheduler.errors import StepFailed
from scheduler.job import JobResult
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info, fake_tokens
from tests.scheduling import assert_answers, batching, sequence
from tests.virtual_loop import run_virtual

STEP_S = 0.01
WIDTHS: Mapping[TokenOutput, int] = {"lexical": 1, "multi_vector": 4, "hidden": 6}
LEXICAL: frozenset[TokenOutput] = frozenset({"lexical"})
BOTH: frozenset[TokenOutput] = frozenset({"lexical", "multi_vector"})
HIDDEN: frozenset[TokenOutput] = frozenset({"hidden"})


def info(max_token_bytes: int = 1 << 20) -> EngineInfo:
    return replace(fake_info(token_outputs=WIDTHS), max_token_bytes=max_token_bytes)


def expected(ids: list[Int32], kind: TokenOutput) -> Float32:
    """Each sequence's tokens as it gives them alone."""
    return np.concatenate([fake_tokens(RaggedBatch.pack([row]), kind, WIDTHS[kind]) for row in ids])


def assert_tokens(result: JobResult, ids: list[Int32], kinds: frozenset[TokenOutput]) -> None:
    assert_answers(result, ids)
    assert result.tokens.keys() == kinds
    for kind, values in result.tokens.items():
        np.testing.assert_array_equal(values, expected(ids, kind))


def test_jobs_of_one_batch_get_what_each_asked_for() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=info(), service_s=STEP_S)
        jobs = [
            ([sequence(5), sequence(3, 50)], BOTH),
            ([sequence(9, 7)], frozenset[TokenOutput]()),
            ([sequence(4, 80), sequence(1, 90), sequence(6)], HIDDEN),
        ]
        async with batching(engine) as batcher:
            results = await asyncio.gather(*(batcher.run(ids, token_outputs=kinds) for ids, kinds in jobs))
        assert [batch.token_outputs for batch in engine.batches] == [BOTH | HIDDEN]
        for (ids, kinds), result in zip(jobs, results, strict=True):
            assert_tokens(result, ids, kinds)

    run_virtual(scenario())


def test_a_batch_of_which_nobody_wants_tokens_gives_none() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=info())
        async with batching(engine) as batcher:
            result = await batcher.run([sequence(5)])
        assert not engine.batches[0].token_outputs
        assert not result.tokens

    run_virtual(scenario())


def test_a_job_of_several_batches_is_put_together() -> None:
    """600 tokens of one value fit 4 x 600 bytes, so 8 sequences of 150 take two steps."""

    async def scenario() -> None:
        engine = FakeEngine(info=info(4 * 600), service_s=STEP_S)
        ids = [sequence(150, 10 * number) for number in range(8)]
        async with batching(engine) as batcher:
            result = await batcher.run(ids, token_outputs=LEXICAL)
        assert [batch.num_tokens for batch in engine.batches] == [600, 600]
        assert_tokens(result, ids, LEXICAL)

    run_virtual(scenario())


def test_what_joins_a_batch_counts_for_all_its_tokens() -> None:
    """A dense job's tokens are given as well; so the batch ends before it grows too large for the engine."""

    async def scenario() -> None:
        engine = FakeEngine(info=info(4 * 6 * 100), service_s=STEP_S)
        async with batching(engine) as batcher:
            plain, hidden = [sequence(80)], [sequence(30)]
            results = await asyncio.gather(batcher.run(plain), batcher.run(hidden, token_outputs=HIDDEN))
        assert [batch.num_tokens for batch in engine.batches] == [80, 30]
        assert_tokens(results[1], hidden, HIDDEN)

    run_virtual(scenario())


def test_halves_after_running_out_of_memory_keep_their_tokens() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=info(), service_s=STEP_S, oom_above_seqs=1)
        ids = [sequence(6), sequence(7, 30)]
        async with batching(engine) as batcher:
            result = await batcher.run(ids, token_outputs=BOTH)
        assert [batch.num_tokens for batch in engine.batches] == [13, 6, 7]
        assert_tokens(result, ids, BOTH)

    run_virtual(scenario())


def test_what_the_engine_cannot_give_is_refused_at_once() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=info(4 * 6 * 100))
        async with batching(engine) as batcher:
            with pytest.raises(ValueError, match="has 101 tokens; a step gives hidden of 100"):
                await batcher.run([sequence(101)], token_outputs=HIDDEN)
        async with batching(FakeEngine()) as batcher:
            with pytest.raises(ValueError, match="gives no hidden of a token"):
                await batcher.run([sequence(3)], token_outputs=HIDDEN)
        assert not engine.batches

    run_virtual(scenario())


class Forgetful(FakeEngine):
    """Gives one token too few."""

    def finish(self, steps: int = 1) -> None:
        lazy: FakeLazyTensor = self.running[0]
        outcome = self._outcome(lazy.batch)
        assert isinstance(outcome, BatchResult)
        lazy.settle(replace(outcome, tokens={kind: rows[1:] for kind, rows in outcome.tokens.items()}))
        super().finish(steps)


def test_an_engine_that_gives_too_few_tokens_fails_the_job() -> None:
    async def scenario() -> None:
        async with batching(Forgetful(info=info())) as batcher:
            with pytest.raises(StepFailed, match="lexical of 2 tokens; the batch has 3"):
                await batcher.run([sequence(3)], token_outputs=LEXICAL)

    run_virtual(scenario())
