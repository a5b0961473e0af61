"""Which sizes a batch is padded to, so that few CUDA graphs serve all batches. Pure integers.

Tokens: 16, 32, 64 (a short query's matrix products take 7 % less at 16 rows than at 64), then multiples of 64
to 1024, of 128 to 2048, of 256 to 16 384, and twice as much for each power of two up to 2048: 34 buckets up
to 4096, 178 up to 131 072. Above 512 tokens padding adds up to 12.5 %, 6 % on average; steps of 256 right
from 1024 would save 4 of the 34 and pad 1025 tokens by 25 %.
Sequences: powers of two. Empty sequences cost next to nothing, so finer steps would only multiply the graphs.
Rows on a CPU: oneDNN compiles a product anew for each number of them, 1 ms and 0.6 MB (docs/reliability.md).
Steps of 2 to 32, since a short text pays for every row, of 4 to 64, 8 to 128, 16 to 512, then an eighth of
the power of two below: 96 sizes up to 16 384. Padding adds 2 % on average to 300 tokens and 4 % to thousands.
"""

from __future__ import annotations

from collections.abc import Iterator


def token_bucket(num_tokens: int) -> int:
    """The smallest bucket that holds `num_tokens` (>= 1) tokens."""
    if num_tokens <= 32:
        step = 16
    elif num_tokens <= 16_384:
        step = 64 if num_tokens <= 1024 else 128 if num_tokens <= 2048 else 256
    else:
        step = min(2048, (1 << (num_tokens - 1).bit_length()) // 64)
    return -(-num_tokens // step) * step


def row_bucket(num_rows: int) -> int:
    """The smallest number of rows, of those that products on a CPU see, that holds `num_rows` (>= 1)."""
    step = max(2, (1 << (num_rows.bit_length() - 1)) // 8)
    if num_rows <= 512:
        step = min(step, 16)
    return -(-num_rows // step) * step


def sequence_bucket(num_seqs: int) -> int:
    """The smallest power of two that is at least `num_seqs` (>= 1)."""
    return 1 << (num_seqs - 1).bit_length()


def token_buckets(max_tokens: int) -> Iterator[int]:
    """Every bucket that a batch of 1 to `max_tokens` tokens can fall into, rising."""
    bucket = 0
    while bucket < max_tokens:
        bucket = token_bucket(bucket + 1)
        yield bucket


def row_buckets(max_rows: int) -> Iterator[int]:
    """Every number of rows that products on a CPU see of batches of 1 to `max_rows` tokens, rising."""
    rows = 0
    while rows < max_rows:
        rows = min(row_bucket(rows + 1), max_rows)
        yield rows


def sequence_buckets(max_seqs: int) -> Iterator[int]:
    """Every bucket that a batch of 1 to `max_seqs` sequences can fall into, rising."""
    bucket = 1
    yield bucket
    while bucket < max_seqs:
        bucket *= 2
        yield bucket


def shapes(max_tokens: int, max_seqs: int) -> Iterator[tuple[int, int]]:
    """Every (token bucket, sequence bucket) that can occur, largest first, so that later ones reuse memory.

    A batch has at least as many tokens as sequences: a token bucket holds no more sequences than tokens.
    """
    for tokens in reversed(list(token_buckets(max_tokens))):
        for seqs in reversed(list(sequence_buckets(min(max_seqs, tokens, max_tokens)))):
            yield tokens, seqs
