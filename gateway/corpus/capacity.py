"""What a corpus of any size takes: GPUs, hours, money, bytes; and what of it breaks first. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gateway.corpus.measured import COUNTED_BYTES_PER_S, dimensions, speed

# Bytes of a vector's value by type.
VALUE_BYTES = {"float32": 4.0, "float16": 2.0, "int8": 1.0, "bits": 0.125}
# Of English text a token, by BPE vocabularies of 100 000 and more.
TEXT_BYTES_PER_TOKEN = 4.0
# Unexpected interruptions a GPU-hour. Source: the Llama 3 report, 419 in 54 days of 16 384 GPUs.
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
# A dead actor's replacement: process, model, first steps. An assumption.
RESTART_S = 120.0
# Of one prefix of S3. Source: its documentation, "at least 3,500 PUT/COPY/POST/DELETE [...] per second".
WRITES_PER_S = 3500.0
# A larger file is begun, uploaded in parts of this size, and ended. Seen of pyarrow 26.
UPLOAD_BYTES = 10 << 20
# Of a shard beside its part: the marker, and a file of rejected rows.
WRITES_BESIDE = 2
# Of small objects read by a rerun's driver: 16 at once, 20 ms each. An assumption.
MARKERS_PER_S = 800.0
# Memory that a driver takes for a shard of its plan, and may take for all. The second is an assumption.
PLAN_BYTES_PER_SHARD, PLAN_BYTES = 800.0, 16e9
# Of a host of eight GPUs, one 100 Gbit/s network card. An assumption.
NETWORK_BYTES_PER_S = 12.5e9 / 8


@dataclass(frozen=True, slots=True)
class Question:
    """rows of so many tokens each. gpus: None: as many as `days` need. dollars: of a GPU-hour."""

    rows: float
    tokens: float
    model: str
    gpus: int | None = None
    days: float = 30.0
    dollars: float = 3.0
    shard_rows: int = 65_536
    shard_bytes: int = 256 << 20

    @property
    def rows_a_shard(self) -> int:
        """Rows that fill a shard, by their number or their text."""
        by_bytes = self.shard_bytes // (self.tokens * TEXT_BYTES_PER_TOKEN)
        return max(1, min(self.shard_rows, int(by_bytes)))


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that more GPUs use up. gpus: so many of them need all there is of it."""

    name: str
    gpus: float


@dataclass(frozen=True, slots=True)
class Answer:
    """hours: of the whole job. lost_gpu_hours: of these, spent on what failures undid."""

    speed: float
    gpus: int
    hours: float
    gpu_hours: float
    dollars: float
    lost_gpu_hours: float
    text_bytes: float
    vector_bytes: dict[str, float]
    shards: int
    shard_s: float
    marker_s: float
    plan_bytes: float
    count_hours: dict[str, float]
    network_share: float
    limits: list[Limit]


def plan(question: Question) -> Answer:
    """The answer from measured speeds and the assumptions above.

    Raises:
        KeyError: the model was not measured.
    """
    rate, shards = speed(question.model, question.tokens), ceil(question.rows / question.rows_a_shard)
    shard_s = question.rows_a_shard / rate
    per_shard_s = shard_s + _lost_s(shard_s)
    gpus = question.gpus or _gpus(shards, per_shard_s, question.days * 86_400)
    hours = (RESTART_S + ceil(shards / gpus) * per_shard_s) / 3600
    # The last round of shards leaves some GPUs without one; they are paid for.
    gpu_hours = hours * gpus
    text_bytes = question.rows * question.tokens * TEXT_BYTES_PER_TOKEN
    values = question.rows * dimensions(question.model)
    return Answer(
        speed=rate,
        gpus=gpus,
        hours=hours,
        gpu_hours=gpu_hours,
        dollars=gpu_hours * question.dollars,
        lost_gpu_hours=shards * _lost_s(shard_s) / 3600,
        text_bytes=text_bytes,
        vector_bytes={name: values * nbytes for name, nbytes in VALUE_BYTES.items()},
        shards=shards,
        shard_s=shard_s,
        marker_s=shards / MARKERS_PER_S,
        plan_bytes=shards * PLAN_BYTES_PER_SHARD,
        count_hours={kind: text_bytes / rate_ / 3600 for kind, rate_ in COUNTED_BYTES_PER_S.items()},
        network_share=rate * question.tokens * TEXT_BYTES_PER_TOKEN / NETWORK_BYTES_PER_S,
        limits=_limits(question, rate, shard_s, shards),
    )


def writes(part_bytes: float) -> int:
    """Requests by which S3 has all of a shard whose part has so many bytes."""
    uploads = ceil(part_bytes / UPLOAD_BYTES)
    return WRITES_BESIDE + (1 if uploads <= 1 else uploads + 2)


def _lost_s(shard_s: float) -> float:
    """Seconds that failures add to a shard: half of it again, and a start, as often as they come."""
    return FAILURES_PER_GPU_HOUR / 3600 * shard_s * (shard_s / 2 + RESTART_S)


def _gpus(shards: int, per_shard_s: float, within_s: float) -> int:
    """The fewest that end in time, or one a shard where nothing is enough."""
    rounds = max(1, int((within_s - RESTART_S) // per_shard_s))
    return ceil(shards / rounds)


def _limits(question: Question, rate: float, shard_s: float, shards: int) -> list[Limit]:
    """What gives way, the first first."""
    text_per_s = rate * question.tokens * TEXT_BYTES_PER_TOKEN
    limits = [
        Limit(f"the driver counts lines of {kind} for as long as the GPUs then work", counted / text_per_s)
        for kind, counted in COUNTED_BYTES_PER_S.items()
    ]
    part_bytes = question.rows_a_shard * dimensions(question.model) * VALUE_BYTES["float32"]
    limits.append(
        Limit(
            "the object store takes no more requests of one prefix, of float32 vectors",
            WRITES_PER_S * shard_s / writes(part_bytes),
        )
    )
    limits.append(Limit("a rerun reads markers for as long as the GPUs work", MARKERS_PER_S * shard_s))
    limits.append(Limit("there is a shard for each GPU and no more", float(shards)))
    return sorted(limits, key=lambda limit: limit.gpus)
