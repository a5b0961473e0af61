"""POST /v1/sequences: what the engine gives of token ids, as it is; for gateways in front of this server."""

from __future__ import annotations

import time

from gateway.exchange import Answer, Call
from gateway.pipeline import Pipeline, Ready
from gateway.rendering import answer, figures
from gateway.replicas import wire
from gateway.schemas import decode

PATH = wire.PATH


class Sequences:
    """The route. All that a gateway's pipeline asks of an engine, it asks here."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, call: Call) -> Answer:
        """Run what `call` holds.

        Raises:
            ApiError: the request is refused, or what tokens gave is not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        started_s = time.perf_counter()
        request = decode(wire.SequencesRequest, call.body, call.media)
        asked = wire.read(request, self._pipeline.limits, self._pipeline.info)
        sequences, types = asked.sequences, asked.token_type_ids
        self._pipeline.check_total(len(sequences.flat), "input_ids")
        ready = Ready(sequences, started_s, call.deadline, types, asked.spans, asked.token_outputs)
        embedded = await self._pipeline.run(ready, lambda result: result.vectors)
        return answer(wire.answer(embedded), call.answer_media, figures(embedded))
