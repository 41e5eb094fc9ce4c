"""The counters of the request path: buckets, and the causes of errors."""

from __future__ import annotations

import pytest
from tables import each_case

from daskserve import errors
from daskserve.common.types import Load
from daskserve.telemetry.histogram import (
    SIZE_BUCKETS,
    HistogramCounts,
    LatencyHistogram,
    cause_of,
    latency_buckets_s,
)
from daskserve.telemetry.replica import ReplicaMetrics


def test_buckets_go_from_100_microseconds_to_a_minute_and_ascend() -> None:
    buckets = latency_buckets_s()
    assert (buckets[0], buckets[-1]) == (0.0001, 60.0)
    assert sorted(set(buckets)) == list(buckets)
    assert sorted(set(SIZE_BUCKETS)) == list(SIZE_BUCKETS)


def test_a_bound_is_inclusive_and_the_last_bucket_is_unbounded() -> None:
    latency = LatencyHistogram()
    for seconds in (0.0, 0.0001, 0.00011, 60.0, 61.0):
        latency.observe(seconds)
    counts = latency.counts
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)
    assert sum(counts) == latency.count == 5
    assert latency.sum == pytest.approx(121.00021)


def test_a_copy_does_not_change_with_the_original() -> None:
    histogram = HistogramCounts((1, 2))
    histogram.observe(1)
    twin = histogram.copy()
    histogram.observe(5)
    twin.add([0, 2, 0], 4)
    assert (histogram.counts, histogram.sum) == ([1, 0, 1], 6)
    assert (twin.counts, twin.sum) == ([1, 2, 0], 5)


def test_adding_a_histogram_with_other_bounds_raises() -> None:
    with pytest.raises(ValueError):
        HistogramCounts((1, 2)).add([1], 1)


def test_the_counters_of_a_replica_are_plain_values() -> None:
    metrics = ReplicaMetrics()
    metrics.handled += 2
    metrics.latency.observe(0.02)
    metrics.give_up(is_late=True)
    metrics.give_up(is_late=False)
    plain = metrics.plain()
    assert (plain["handled_total"], plain["cancelled_total"], plain["timed_out_total"]) == (2, 2, 1)
    assert plain["latency_counts"] == metrics.latency.counts
    assert plain["latency_sum_s"] == 0.02


def test_batches_are_counted_by_method() -> None:
    metrics = ReplicaMetrics()
    metrics.batches_of("predict").observe([0.001, 0.0], 4)
    metrics.batches_of("predict").ended(0.25)
    metrics.batches_of("predict").observe([0.5])
    predict = metrics.batches_of("predict")
    assert (predict.sizes.counts[:2], predict.sizes.sum) == ([1, 1], 3)
    assert (predict.shares.count, predict.shares.sum, predict.durations.sum) == (1, 0.5, 0.25)
    assert (predict.waits.count, predict.waits.sum) == (3, pytest.approx(0.501))
    samples = [sample for sample in metrics.samples(("i", "d", "d#1")) if sample[0].startswith("batch")]
    assert [sample[:2] for sample in samples] == [
        ("batch_size", ("i", "d", "predict")),
        ("batch_wait_seconds", ("i", "d", "predict")),
        ("batch_duration_seconds", ("i", "d", "predict")),
        ("batch_utilization_ratio", ("i", "d", "predict")),
    ]


class Queue:
    def length(self) -> int:
        return 2


def test_the_queues_of_a_batched_method_are_measured_while_they_exist() -> None:
    metrics = ReplicaMetrics()
    metrics.record_start(1.0, 1.0)
    queues = [Queue(), Queue()]
    for each in queues:
        metrics.batches_of("predict").watch_queue(each.length)

    def queued() -> float | HistogramCounts:
        found = metrics.states(
            ("i", "d", "d#1"),
            load=Load(0, 0),
            concurrency=1,
            abandoned=0,
            loop_blocks=0,
            probe_failures=0,
            is_healthy=True,
        )
        [value] = [
            value for name, labels, value in found if name == "batch_queued_items" and "predict" in labels
        ]
        return value

    assert queued() == 4
    queues.pop()
    del each
    assert queued() == 2


@each_case(
    ("error", "cause"),
    [
        (errors.BackPressureError("x"), "back_pressure"),
        (errors.RequestTimeoutError("x"), "timeout"),
        (errors.ActorLostError("x"), "replica_lost"),
        (errors.ReplicaBusyError("x"), "unavailable"),
        (errors.NotRegisteredError("x"), "bad_request"),
        (errors.ClosedError("x"), "internal"),
        (KeyError("x"), "user_code"),
        (TimeoutError("x"), "user_code"),
        (errors.UserCodeError("x"), "user_code"),
    ],
)
def test_every_error_has_a_cause(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause
