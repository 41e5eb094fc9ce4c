"""Which backends must have a running replica for the instance to be ready."""

from __future__ import annotations

from typing import Any

from control_harness import backend
from tables import each_case

from daskserve.control.views.readiness import should_run


def scaled(least: int, **more: Any) -> dict[str, Any]:
    scaling = {"min_replicas": least, "max_replicas": 3, **more}
    return {"config": {"autoscaling_config": scaling}}


@each_case(
    ("fields", "expected"),
    [
        ({}, True),
        ({"is_deleting": True}, False),
        ({"capacity": 0.0}, False),
        ({**scaled(1), "scaled_to": 2}, True),
        ({**scaled(0), "scaled_to": 0}, False),
        ({**scaled(0), "scaled_to": 1}, False),  # it wakes up
        ({**scaled(0, initial_replicas=1), "scaled_to": 1, "goal": "g"}, True),
        ({**scaled(0, initial_replicas=0), "scaled_to": 1, "goal": "g"}, False),
    ],
)
def test_a_backend_that_may_be_at_zero_need_not_run(fields: dict[str, Any], expected: bool) -> None:
    assert should_run(backend(**fields)) is expected
