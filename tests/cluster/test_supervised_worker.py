"""When the workers of a local cluster are replaced."""

from __future__ import annotations

from daskserve.cluster.dask.supervised_worker import MAX_DELAY_S, QUICK_RESTARTS, SETTLED_S, RestartPace


def test_a_worker_that_dies_now_and_then_is_replaced_at_once() -> None:
    pace = RestartPace()
    assert [pace.delay(SETTLED_S) for _ in range(20)] == [0.0] * 20


def test_workers_that_die_again_and_again_come_back_at_longer_intervals_until_one_lives() -> None:
    pace = RestartPace()
    assert [pace.delay(0.5) for _ in range(QUICK_RESTARTS)] == [0.0] * QUICK_RESTARTS
    assert [pace.delay(0.5) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, MAX_DELAY_S, MAX_DELAY_S]
    assert [pace.delay(0.0) for _ in range(2000)][-1] == MAX_DELAY_S
    assert [pace.delay(lived) for lived in (SETTLED_S, 0.5, 0.5, 0.5)] == [0.0, 0.0, 0.0, 1.0]
