"""The step of a backend without an answer from its policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from control_harness import backend

from daskserve.autoscaling import Sample
from daskserve.control.scaling.snapshot import BackendSnapshot
from daskserve.options.autoscaling import AutoscalingConfig

WAITING, IDLE = Sample(1.0, 0.0, 3.0), Sample(1.0, 0.0, 0.0)


def snapshot(target: int, sample: Sample, capacity: float | None = None, **options: Any) -> BackendSnapshot:
    config = {"max_replicas": 8, "min_replicas": 0, **options}
    record = replace(backend(config={"autoscaling_config": config}), scaled_to=target, capacity=capacity)
    return BackendSnapshot.of(record, AutoscalingConfig(**config), sample, 0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (snapshot(0, WAITING), 1),
        (snapshot(0, WAITING, multiple_of=4), 4),
        (snapshot(0, WAITING, min_replicas=3), 3),
        (snapshot(0, WAITING, 50, min_replicas=3), 2),
        (snapshot(0, WAITING, 0), 0),
        (snapshot(0, WAITING, dry_run=True), 0),
        (replace(snapshot(0, WAITING), config=None, bounds=None), 0),
        (snapshot(0, IDLE), 0),
        (snapshot(2, WAITING), 2),
    ],
)
def test_nothing_changes_unless_requests_wait_without_a_replica(seen: BackendSnapshot, expected: int) -> None:
    step = seen.without_policy("it hangs")
    assert (step.replicas, step.wanted) == (expected, expected)
    assert step.reason == (
        f"it hangs; {expected} for the waiting requests"
        if expected != seen.target
        else "it hangs, so nothing changes"
    )
