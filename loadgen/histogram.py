"""HdrHistogram's layout and wire format, for one array at a time.

Quantiles here are exact, from all samples; a histogram is how they are handed to other tools. The package of
that name takes one value a call and is a compiled extension; this is one pass of numpy.
Source: HdrHistogram 2.1, "V2 encoding": ZigZag LEB128 counts, zlib, base64.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

from loadgen.recording import Floats

Counts = npt.NDArray[np.int64]
LOWEST_US, HIGHEST_US, DIGITS = 1, 3_600_000_000, 3
SUB_BUCKET_BITS = 11  # 2048 equal steps a doubling keep three digits
V2_COOKIE, V2_COMPRESSED_COOKIE = 0x1C849313, 0x1C849314


def counts(seconds: Floats) -> Counts:
    """Counts i64[n] by HdrHistogram's index, of latencies of 1 µs to 1 h; n ends at the last count."""
    us = np.clip(np.rint(seconds * 1e6), LOWEST_US, HIGHEST_US).astype(np.int64)
    # frexp's exponent is the bit length, exact below 2**53.
    bits = np.frexp(us.astype(np.float64))[1]
    bucket = np.maximum(bits - SUB_BUCKET_BITS, 0)
    half = 1 << (SUB_BUCKET_BITS - 1)
    return np.bincount((bucket << (SUB_BUCKET_BITS - 1)) + (us >> bucket), minlength=half).astype(np.int64)


def encode(seconds: Floats) -> str:
    """The base64 of a compressed V2 histogram of microseconds, as every HdrHistogram library reads it."""
    payload = _zigzag(counts(seconds))
    header = struct.pack(">iiiiqqd", V2_COOKIE, len(payload), 0, DIGITS, LOWEST_US, HIGHEST_US, 1.0)
    packed = zlib.compress(header + payload)
    return base64.b64encode(struct.pack(">ii", V2_COMPRESSED_COOKIE, len(packed)) + packed).decode()


def _zigzag(values: Counts) -> bytes:
    """Counts as variable-length integers; a run of n zeros is the number -n."""
    out = bytearray()
    last = -1
    for index in np.flatnonzero(values).tolist():
        if (zeros := index - last - 1) > 0:
            out += _leb128((zeros << 1) - 1)
        out += _leb128(int(values[index]) << 1)
        last = index
    return bytes(out)


def _leb128(value: int) -> bytes:
    """Seven bits a byte, lowest first; a ninth byte would hold eight."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def percentile_curve(seconds: Floats, ticks: int = 5) -> list[tuple[float, float, int]]:
    """(milliseconds, quantile, samples up to it) at HdrHistogram's ticks: `ticks` a halving of the rest."""
    ordered = np.sort(seconds) * 1e3
    total, rows, quantile = len(ordered), list[tuple[float, float, int]](), 0.0
    while total:
        rank = max(1, int(np.ceil(quantile * total - 1e-9)))
        value = float(ordered[rank - 1])
        rows.append((value, quantile, int(np.searchsorted(ordered, value, side="right"))))
        if rank == total:
            break
        halvings = int(np.floor(np.log2(1 / (1 - quantile)))) + 1
        quantile += 1 / (ticks * 2**halvings)
    return [*rows, (float(ordered[-1]), 1.0, total)] if total else []


def hgrm(curve: list[tuple[float, float, int]], mean_ms: float, stdev_ms: float) -> str:
    """The text of a .hgrm file, as HdrHistogram's plotter takes it."""
    lines = [f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}", ""]
    for value, quantile, count in curve:
        inverse = f"{1 / (1 - quantile):>14.2f}" if quantile < 1 else ""
        lines.append(f"{value:>12.3f} {quantile:>14.12f} {count:>10} {inverse}".rstrip())
    maximum, total = (curve[-1][0], curve[-1][2]) if curve else (0.0, 0)
    lines.append(f"#[Mean    = {mean_ms:>12.3f}, StdDeviation   = {stdev_ms:>12.3f}]")
    lines.append(f"#[Max     = {maximum:>12.3f}, Total count    = {total:>12}]")
    lines.append(f"#[Buckets = {32 - SUB_BUCKET_BITS + 1:>12}, SubBuckets     = {1 << SUB_BUCKET_BITS:>12}]")
    return "\n".join(lines) + "\n"
