from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from loadgen.conductor import StreamRun, Warmup
from loadgen.plan import Pacing, Shape, Stream
from loadgen.recording import Beat, Recorder, Recording
from loadgen.summary import client_cpu, latency, summarise, timeline


def recording(
    rows: list[tuple[float, float, float]],
    errors: tuple[tuple[float, str], ...] = (),
    beats: tuple[Beat, ...] = (),
) -> Recording:
    """Requests of 2 sequences and 30 tokens, as (intended, sent, done)."""
    intended, sent, done = np.array(rows, float).reshape(-1, 3).T
    return Recording(
        intended_s=intended,
        sent_s=sent,
        done_s=done,
        request=np.zeros(len(rows), np.int32),
        server_ms=np.full((len(rows), 3), np.nan),
        errors=errors,
        beats=beats,
        sequences=np.array([2]),
        tokens=np.array([30]),
    )


def run_of(*recordings: Recording, pacing: Pacing = Pacing.CLOSED) -> StreamRun:
    stream = Stream(Shape(2, 15, 15), pacing=pacing, rate=1.0, processes=len(recordings))
    return StreamRun(stream, recordings, 10.0, 20.0, Warmup(5, 2.0, True))


def test_quantiles_are_samples_of_nearest_rank() -> None:
    found = latency(np.arange(1, 1001) / 1e3)
    assert found.quantiles == pytest.approx({"p50": 500.0, "p90": 900.0, "p99": 990.0, "p99.9": 999.0})
    assert (found.count, found.max) == (1000, 1000.0)
    assert found.mean == pytest.approx(500.5)


@pytest.mark.parametrize(
    ("count", "thin"),
    [(19, ["p50", "p90", "p99", "p99.9"]), (20, ["p90", "p99", "p99.9"]), (1000, ["p99.9"]), (10_000, [])],
)
def test_a_quantile_without_ten_samples_beyond_it_is_marked(count: int, thin: list[str]) -> None:
    assert latency(np.ones(count)).thin == thin


def test_a_closed_loop_counts_what_ended_in_the_window() -> None:
    found = summarise(run_of(recording([(8, 8, 9), (9, 9, 11), (11, 11, 14), (14, 14, 21)])))
    assert found.service.count == 2
    assert found.service.max == pytest.approx(3000.0)
    # 1 of 2 s of the second, all of the third, 6 of 7 s of the last are inside: 2.357 requests in 10 s.
    assert found.requests_per_s == pytest.approx((1 / 2 + 1 + 6 / 7) / 10)
    assert found.embeddings_per_s == pytest.approx(2 * found.requests_per_s)
    assert found.tokens_per_s == pytest.approx(30 * found.requests_per_s)
    assert found.send_lag is None and found.rate is None


def test_an_open_loop_counts_what_was_due_in_the_window() -> None:
    rows = [(9, 9, 12), (11, 11.5, 12), (19, 25, 30)]
    found = summarise(run_of(recording(rows), pacing=Pacing.POISSON))
    assert found.response.count == 2
    assert found.response.max == pytest.approx(11_000.0)
    assert found.service.max == pytest.approx(5000.0)
    assert found.send_lag is not None and found.send_lag.max == pytest.approx(6000.0)
    assert any("sends were late" in warning for warning in found.warnings)
    assert set(found.distributions) == {"response", "service"}


def test_errors_and_refusals_are_apart_and_of_the_window() -> None:
    errors = (
        (9.0, "http 500"),
        (11.0, "http 429"),
        (12.0, "http 429"),
        (13.0, "http 500"),
        (21.0, "http 429"),
    )
    found = summarise(run_of(recording([(11, 11, 12)], errors), recording([], ((15.0, "reset"),))))
    assert found.rejected == 2
    assert found.errors == {"http 500": 1, "reset": 1}
    assert found.service.count == 1


def test_a_busy_client_is_warned_about() -> None:
    busy = tuple(Beat(float(at), at * 0.9, at, 0) for at in range(5, 25))
    idle = tuple(Beat(float(at), at * 0.1, at, 0) for at in range(5, 25))
    found = summarise(run_of(recording([(11, 11, 12)], beats=busy), recording([(11, 11, 12)], beats=idle)))
    assert found.client_cpu == pytest.approx([0.9, 0.1])
    assert [warning for warning in found.warnings if "90% of a core" in warning]
    assert summarise(run_of(recording([(11, 11, 12)], beats=idle))).warnings == []


def test_a_client_that_polls_is_meant_to_be_busy() -> None:
    busy = tuple(Beat(float(at), at * 1.0, at, 0) for at in range(5, 25))
    run = run_of(recording([(11, 11, 12)], beats=busy))
    assert summarise(replace(run, stream=replace(run.stream, polls=True))).warnings == []


def test_client_cpu_is_of_the_window() -> None:
    # Busy while it warmed up, idle afterwards.
    beats = tuple(Beat(float(at), min(at, 10), at, 0) for at in range(0, 25))
    assert client_cpu(beats, 10.0, 20.0) == 0.0
    assert client_cpu(beats, 0.0, 10.0) == 1.0
    assert client_cpu(beats[:1], 0.0, 10.0) == 0.0


def test_nothing_answered_is_a_warning_not_a_crash() -> None:
    found = summarise(run_of(recording([])))
    assert found.service.count == 0 and found.embeddings_per_s == 0.0
    assert any("no request was answered" in warning for warning in found.warnings)


def test_a_rate_that_never_settled_is_a_warning() -> None:
    run = run_of(recording([(11, 11, 12)]))
    unsettled = StreamRun(run.stream, run.recordings, 10.0, 20.0, Warmup(5, 20.0, False))
    assert any("not seen to settle" in warning for warning in summarise(unsettled).warnings)


def test_the_timeline_has_a_slice_a_second() -> None:
    moments = timeline(np.array([0.1, 0.2, 2.5, 11.0]), np.array([1.0, 3.0, 2.0, 9.0]), 10.0)
    assert [(m.at_s, m.count, m.max) for m in moments] == [
        (0.5, 2, 3000.0),
        (2.5, 1, 2000.0),
        (11.5, 1, 9000.0),
    ]


def _kept(keep: int, answers: int) -> list[int]:
    """Numbers of the answers that are kept of so many."""
    from loadgen.http1 import Response

    recorder = Recorder(keep=keep)
    for number in range(answers):
        recorder.answered(number % 64, 0.0, 0.0, Response(200, b"", str(number).encode(), 1.0))
    assert all(number % 64 == int(response.body) % 64 for number, response in recorder.samples.values())
    return [int(response.body) for _, response in recorder.freeze([], [], []).samples]


@pytest.mark.parametrize("answers", [1, 2, 3, 4, 5, 6, 500])
def test_kept_answers_are_the_first_the_last_and_some_between(answers: int) -> None:
    for _ in range(50 if answers < 500 else 2):
        kept = _kept(4, answers)
        assert len(kept) == len(set(kept)) == min(4, answers)
        assert kept[:2] == [0, answers - 1][:answers]


def test_each_answer_between_is_as_likely_to_be_kept() -> None:
    times = Counter(number for _ in range(4000) for number in _kept(4, 8)[2:])
    assert sorted(times) == [1, 2, 3, 4, 5, 6]
    # 4000 times two of six: 1333 each, give or take 30 in two of three.
    assert all(abs(seen - 4000 / 3) < 6 * 30 for seen in times.values()), times


def test_the_server_split_is_read_from_headers() -> None:
    from loadgen.http1 import Response

    recorder = Recorder()
    head = b"HTTP/1.1 200 OK\r\nX-Queue-Time: 0.5\r\nx-inference-time:12\r\n\r\n"
    recorder.answered(0, 11.0, 11.0, Response(200, head, b"", 12.0))
    found = summarise(run_of(recorder.freeze([], [2], [30])))
    assert found.server_ms == {"queue": {"p50": 0.5, "p99": 0.5}, "inference": {"p50": 12.0, "p99": 12.0}}
