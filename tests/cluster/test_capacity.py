"""What the scheduler decides in view of what instances report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.base import UseReport
from daskserve.cluster.capacity import Capacity

W1, W2 = "tcp://w1", "tcp://w2"


async def _evacuate(workers: list[str]) -> None:
    raise AssertionError("not in these tests")


@pytest.fixture
def capacity() -> Capacity:
    workers = {W1: SimpleNamespace(nthreads=2), W2: SimpleNamespace(nthreads=2)}
    scheduler: Any = SimpleNamespace(
        workers=workers,
        idle_timeout=300,
        handlers={"adaptive_target": lambda *args, **kwargs: 1, "retire_workers": None},
    )
    capacity = Capacity(scheduler, _evacuate, lambda: None)
    capacity.install()
    return capacity


def test_a_worker_is_free_once_every_instance_knows_that_it_leaves_and_has_nothing_there(
    capacity: Capacity,
) -> None:
    """A report from before it knew may be followed by a replica that it was just placing."""
    assert not capacity.is_free({W1}, ["a"])
    capacity.report("a", UseReport(in_use=frozenset({W2})))
    assert not capacity.is_free({W1}, ["a"])
    capacity.report("a", UseReport(in_use=frozenset({W1, W2}), retiring=frozenset({W1})))
    assert not capacity.is_free({W1}, ["a"])
    capacity.report("a", UseReport(in_use=frozenset({W2}), retiring=frozenset({W1})))
    assert capacity.is_free({W1}, ["a"])
    assert not capacity.is_free({W1}, ["a", "b"])
    assert not capacity.is_free({W1, W2}, ["a"])


def test_what_an_instance_without_a_controller_has_still_counts(capacity: Capacity) -> None:
    capacity.report("a", UseReport(in_use=frozenset({W1})))
    assert not capacity.is_free({W1}, [])
    assert capacity.is_free({W2}, [])


def test_workers_of_any_instance_count_and_waiting_replicas_add_to_the_target(capacity: Capacity) -> None:
    assert capacity.adaptive_target() == 1
    capacity.report("a", UseReport(in_use=frozenset({W1})))
    capacity.report("b", UseReport(in_use=frozenset({W1, W2}), waiting_workers=2))
    assert capacity.in_use() == {W1, W2}
    assert capacity.adaptive_target() == 2 + 2
    capacity.forget("b")
    assert capacity.in_use() == {W1}
    assert capacity.adaptive_target() == 1
