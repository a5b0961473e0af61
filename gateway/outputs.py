"""Answers that hold more than dense vectors: words that weigh, and a vector for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.dtypes import Dtype, cast, widen
from gateway.encoding import WRITERS, Encoding, json_numbers, json_rows
from gateway.errors import shown
from gateway.inputs import invalid
from gateway.media import Media
from gateway.pipeline import DENSE, Embedded
from gateway.schemas import EmbeddingItem, SparseBlock, SparseVector, TokenBlock, encode
from gateway.token_outputs import TokenRows, Words, nonzero
from rose.batch import EngineInfo

OUTPUTS = ("dense", "sparse", "multi_vector")
_ITEMS_A_TURN = 16  # 0.4 ms of JSON at 1024 dimensions


def read_outputs(names: list[str] | None) -> tuple[str, ...]:
    """A request's `outputs`, each once; dense vectors if it names none.

    Raises:
        ApiError: INVALID_VALUE.
    """
    if names is None:
        return DENSE
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown or not names:
        what = shown(unknown[0]) if unknown else "an empty list"
        raise invalid(f"outputs has {what}; this server knows {', '.join(OUTPUTS)}", "outputs")
    return tuple(dict.fromkeys(names))


async def words_of(embedded: Embedded, info: EngineInfo) -> list[Words]:
    """The words of each text: of SPLADE models the vectors' own, else what the tokens' weights make."""
    if embedded.tokens is None:
        return [nonzero(row) for row in embedded.vectors]
    return await embedded.tokens.words(info.unweighted_ids)


class Rendering(msgspec.Struct, frozen=True):
    """What an answer holds of each text. dense: values [n, w] of `dtype`. None: not asked for."""

    dense: NDArray[Any] | None
    words: list[Words] | None
    vectors: TokenRows | None
    dtype: Dtype

    @classmethod
    async def of(
        cls, embedded: Embedded, outputs: Sequence[str], dtype: Dtype, info: EngineInfo
    ) -> Rendering:
        """What `outputs` name of `embedded`, the vectors as `dtype`.

        Raises:
            ApiError: INVALID_VALUE, when a value is beyond what the type can hold.
        """
        vectors = None
        if "multi_vector" in outputs and embedded.tokens is not None:
            rows = embedded.tokens.vectors()
            vectors = TokenRows(cast(rows.values, None, dtype), rows.offsets)
        return cls(
            cast(embedded.vectors, embedded.int8, dtype) if "dense" in outputs else None,
            await words_of(embedded, info) if "sparse" in outputs else None,
            vectors,
            dtype,
        )

    async def items(self, encoding: Encoding, media: Media) -> list[msgspec.Raw]:
        """Encoded EmbeddingItems, one a text. Gives the loop a turn between them."""
        texts = None if self.vectors is None else self.vectors.texts
        count = next(len(part) for part in (self.dense, self.words, texts) if part is not None)
        encoded: list[msgspec.Raw] = []
        for index in range(count):
            item = self._item(index, encoding, media)
            if texts is not None:
                await self._add_vectors(item, texts[index], encoding, media)
            encoded.append(msgspec.Raw(encode(item, media)))
            if texts is not None or index % _ITEMS_A_TURN == _ITEMS_A_TURN - 1:
                await asyncio.sleep(0)
        return encoded

    def sparse_block(self) -> SparseBlock | msgspec.UnsetType:
        """All texts' words end to end."""
        if self.words is None:
            return msgspec.UNSET
        offsets = np.cumsum([0, *(len(words.indices) for words in self.words)], dtype="<i4")
        indices = np.concatenate([words.indices for words in self.words]).astype("<i4")
        values = np.concatenate([words.values for words in self.words]).astype("<f4")
        return SparseBlock(offsets=offsets.data, indices=indices.data, values=values.data)

    def token_block(self) -> TokenBlock | msgspec.UnsetType:
        """All texts' vectors of tokens end to end."""
        return msgspec.UNSET if self.vectors is None else token_block(self.vectors)

    def _item(self, index: int, encoding: Encoding, media: Media) -> EmbeddingItem:
        item = EmbeddingItem(index=index)
        if self.dense is not None:
            item.embedding = WRITERS[encoding, media](self._shown(self.dense[index], encoding))
        if self.words is not None:
            words = self.words[index]
            values = json_numbers(words.values) if media is Media.JSON else words.values.tolist()
            item.sparse = SparseVector(indices=words.indices.tolist(), values=values)
        return item

    async def _add_vectors(
        self, item: EmbeddingItem, rows: NDArray[Any], encoding: Encoding, media: Media
    ) -> None:
        if encoding is Encoding.BASE64:
            item.multi_vector_shape = (rows.shape[0], rows.shape[1])
            item.multi_vector = WRITERS[encoding, media](rows)
        elif media is Media.JSON:
            item.multi_vector = msgspec.Raw(await json_rows(self._shown(rows, encoding)))
        else:
            item.multi_vector = self._shown(rows, encoding).tolist()

    def _shown(self, values: NDArray[Any], encoding: Encoding) -> NDArray[Any]:
        return widen(values, self.dtype) if encoding is Encoding.FLOAT else values


def token_block(rows: TokenRows) -> TokenBlock:
    """`rows` as they are, in one block."""
    values, offsets = np.ascontiguousarray(rows.values), np.array(rows.offsets, "<i4")
    return TokenBlock(shape=(values.shape[0], values.shape[1]), offsets=offsets.data, vectors=values.data)
