from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.histogram import counts, encode, hgrm, percentile_curve

LATENCIES = st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=300)


@settings(max_examples=60, deadline=None)
@given(LATENCIES)
def test_other_libraries_read_the_histogram(values: list[float]) -> None:
    hdrh = pytest.importorskip("hdrh.histogram")
    seconds = np.array(values)
    decoded = hdrh.HdrHistogram.decode(encode(seconds))
    assert decoded.get_total_count() == len(values)
    own = hdrh.HdrHistogram(1, 3_600_000_000, 3)
    for us in np.rint(seconds * 1e6).astype(int).tolist():
        own.record_value(max(1, us))
    for percentile in (0, 25, 50, 90, 99, 99.9, 100):
        assert decoded.get_value_at_percentile(percentile) == own.get_value_at_percentile(percentile)
    # Three digits are kept of what was measured.
    assert decoded.get_max_value() == pytest.approx(max(seconds.max() * 1e6, 1), rel=0.001, abs=1)


def test_counts_are_where_the_layout_puts_them() -> None:
    # Below 2048 µs one count a microsecond, then one for two, …
    found = counts(np.array([1e-6, 2047e-6, 2048e-6, 2049e-6, 2050e-6, 4096e-6]))
    assert np.flatnonzero(found).tolist() == [1, 2047, 2048, 2049, 3072]
    assert found[2048] == 2
    assert counts(np.array([0.0])).sum() == 1


@given(LATENCIES)
def test_the_curve_is_made_of_samples(values: list[float]) -> None:
    curve = percentile_curve(np.array(values))
    ordered = sorted(values)
    assert [row[1] for row in curve] == sorted(row[1] for row in curve)
    assert curve[0][0] == pytest.approx(ordered[0] * 1e3)
    assert curve[-1] == (pytest.approx(ordered[-1] * 1e3), 1.0, len(values))
    for value, quantile, count in curve:
        rank = max(1, int(np.ceil(quantile * len(values) - 1e-9)))
        assert value == pytest.approx(ordered[rank - 1] * 1e3)
        assert count >= rank


def test_a_curve_of_nothing_is_empty() -> None:
    assert percentile_curve(np.empty(0)) == []


def test_hgrm_is_laid_out_for_the_plotter() -> None:
    lines = hgrm(percentile_curve(np.array([0.001, 0.002, 0.003, 0.004])), 2.5, 1.1).splitlines()
    assert lines[0].split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]
    assert lines[2].split() == ["1.000", "0.000000000000", "1", "1.00"]
    assert lines[-4].split() == ["4.000", "1.000000000000", "4"]
    assert lines[-2].startswith("#[Max     =        4.000, Total count    =            4]")
