"""Vectors of chunks within their documents: a document goes through the model whole, then chunks are pooled.

A chunk of no tokens (text that the tokenizer drops, such as blanks) keeps its place; its vector is zeros.
Source: Günther et al., Late Chunking, arXiv 2409.04701; pplx-embed-context's modeling.py, which excludes the
separators from the means.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from gateway.deadline import Deadline
from gateway.errors import ApiError, ErrorKind
from gateway.inputs import invalid
from gateway.pipeline import Embedded, Pipeline, Ready, vectors_of
from gateway.tokenization.base import SpecialTokens
from rose.batch import Int32, RaggedIds


class DocumentJob(msgspec.Struct, frozen=True):
    """Documents as lists of chunks, none of them empty. name: the field they came from.

    Other fields as in EmbedJob.
    """

    documents: list[list[str]]
    name: str
    dimensions: int
    normalize: bool
    deadline: Deadline | None = None
    max_request_tokens: int | None = None


class LateChunker:
    """Embeds chunks with any model that pools by mean.

    Chunks are tokenised one by one and joined here, by the model's separator if it was trained with one: what
    a text says is never taken for the end of its chunk.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        separator = pipeline.info.chunk_separator
        self._separator = np.array([] if separator is None else [separator], np.int32)

    async def embed(self, job: DocumentJob) -> Embedded:
        """Vectors of all chunks, in their order.

        Raises:
            ApiError: the model does not pool by mean, or a document has too many tokens or chunks.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        info = self._pipeline.info
        if info.task != "embed" or info.pooling != "mean":
            message = f"model {info.model} gives no vectors of chunks within their document: it takes no mean"
            raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="model")
        started_s = time.perf_counter()
        tokenizer = self._pipeline.tokenizer
        ids = await tokenizer.encode([chunk for chunks in job.documents for chunk in chunks])
        chunks = RaggedIds.of([tokenizer.special_tokens.strip(row) for row in ids])
        self._pipeline.check_ids(chunks, lambda index: _place(job, index))
        ends = accumulate(map(len, job.documents), initial=0)
        joined = [self._join(chunks[start:end], tokenizer.special_tokens) for start, end in pairwise(ends)]
        sequences = RaggedIds.of([sequence for sequence, _ in joined])
        self._check(job, sequences)
        self._pipeline.check_total(len(sequences.flat), job.name, job.max_request_tokens)
        ready = Ready(sequences, started_s, job.deadline, spans=[own for _, own in joined])
        dimensions, normalize = job.dimensions, job.normalize
        return await self._pipeline.run(ready, lambda result: vectors_of(result, dimensions, normalize))

    def _join(self, chunks: Sequence[Int32], template: SpecialTokens) -> tuple[Int32, Int32]:
        """One document's ids, and the places i32[k, 2] of its chunks in them."""
        parts, spans, at = [template.prefix], [], len(template.prefix)
        for index, chunk in enumerate(chunks):
            if index:
                parts.append(self._separator)
                at += len(self._separator)
            parts.append(chunk)
            spans.append((at, at + len(chunk)))
            at += len(chunk)
        parts.append(template.suffix)
        return np.concatenate(parts), np.array(spans, np.int32)

    def _check(self, job: DocumentJob, sequences: RaggedIds) -> None:
        limit, most = self._pipeline.limits.max_tokens, self._pipeline.info.max_batch_seqs
        for index, (length, chunks) in enumerate(zip(sequences.lengths, job.documents, strict=True)):
            place = f"{job.name}[{index}]"
            if length == 0:
                raise invalid(f"{place} has no tokens", job.name)
            if length > limit:
                message = f"{place} has {length} tokens; this model takes at most {limit} a document"
                raise ApiError(ErrorKind.INPUT_TOO_LONG, message, param=job.name)
            if len(chunks) > most:
                message = f"{place} has {len(chunks)} chunks; this server takes at most {most} a document"
                raise invalid(f"{message} (--max-batch-seqs)", job.name)


def _place(job: DocumentJob, index: int) -> str:
    """How a message names chunk number `index` of all."""
    for number, chunks in enumerate(job.documents):
        if index < len(chunks):
            return f"{job.name}[{number}][{index}]"
        index -= len(chunks)
    raise IndexError(index)
