"""What a corpus job is asked to do; built once by the composition root, sent to every worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from gateway.tokenization.base import Tokenizer
from rose.batch import Engine
from scheduler.options import SchedulerOptions

VectorType = Literal["float32", "float16", "int8", "bits"]
VECTOR_TYPES: tuple[VectorType, ...] = ("float32", "float16", "int8", "bits")
Format = Literal["parquet", "lance", "none"]
FORMATS: tuple[Format, ...] = ("parquet", "lance", "none")
DISTANCES = ("cosine", "dot", "euclid", "manhattan")


@dataclass(frozen=True, slots=True)
class QdrantOptions:
    """A collection of Qdrant. distance: None: cosine, or what the collection has. key: its API key."""

    url: str
    collection: str
    distance: str | None = None
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """IN, OUT, what is made of a row, and how much at a time.

    id_column: None: rows are known by their file and row alone.
    vectors: the type of the values; bits are packed, eight to a uint8, the first in the highest bit.
    dimensions: leading values that are kept; None: all. normalize: None: as the model's own files say.
    truncate: which side of a text that is too long is cut; "off": the row is rejected.
    shard_rows, shard_bytes: a shard is full at either; bytes are those of the input.
    window_rows, window_bytes: rows that are sorted by length together, and the most text among them.
    windows: how many of them a worker holds at once.
    format: parts, a Lance table, or "none": only qdrant has the vectors. qdrant: gets them, too.
    """

    source: str
    out: str
    text_column: str = "text"
    id_column: str | None = None
    vectors: VectorType = "float32"
    format: Format = "parquet"
    qdrant: QdrantOptions | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    truncate: Literal["off", "end", "start"] = "off"
    shard_rows: int = 65_536
    shard_bytes: int = 256 << 20
    window_rows: int = 8192
    window_bytes: int = 32 << 20
    windows: int = 3
    tokenizer_threads: int = 4
    redo: bool = False
    refuse_duplicate_ids: bool = False
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the cluster is, and what an actor of the pool takes of it.

    address: "local" starts one here, "auto" finds one, else host:port. actors: None: as many as fit.
    """

    address: str
    actors: int | None = None
    gpus_per_actor: float = 1.0
    cpus_per_actor: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that runs, and what turns text into its ids. digest: of the files it was loaded from."""

    engine: Engine
    tokenizer: Tokenizer
    digest: str
    scheduler: SchedulerOptions


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model before it is loaded. load: blocks for seconds, and can be sent to another process.

    dtype: of the arithmetic, as asked for; what "auto" came to is the engine's to say.
    """

    name: str
    digest: str
    dtype: str
    load: Callable[[], LoadedModel]
