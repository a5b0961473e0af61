from __future__ import annotations

from scheduler.errors import Backlog, DeadlineExpired, Draining, EngineDead, QueueFull, StepFailed
from scheduler.metrics import Histogram, SchedulerMetrics


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 7, 100):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 2]
    assert (histogram.count, histogram.total) == (6, 115.0)
    assert repr(histogram) == "<Histogram of 6, mean 19.2>"


def test_errors_are_counted_by_kind() -> None:
    metrics = SchedulerMetrics()
    for error in (DeadlineExpired(1.0), StepFailed("x"), EngineDead("x"), Draining("x")):
        metrics.count_error(error)
    for refusal in (QueueFull(1, 1, Backlog(1, 1, 1, 1), 1.0), EngineDead("x"), Draining("x")):
        metrics.count_refusal(refusal)
    assert (metrics.expired, metrics.failed) == (1, 3)
    assert (metrics.refused_full, metrics.refused_closed) == (1, 2)


def test_launches_are_counted() -> None:
    metrics = SchedulerMetrics()
    metrics.count_launch(100, 3)
    metrics.count_launch(28, 1)
    assert (metrics.batches, metrics.tokens, metrics.seqs) == (2, 128, 4)
    assert (metrics.tokens_per_batch.total, metrics.seqs_per_batch.total) == (128, 4)
