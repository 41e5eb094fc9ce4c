"""The number that the autoscaler wants, from one config to the next and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from control_harness import Bench, backend
from tables import each_case

from daskserve.control.observed.observed import Scaling
from daskserve.control.records.records import BackendRecord
from daskserve.control.scaling.recorded import carried_over
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig

OPTIONS: Mapping[str, Any] = {"min_replicas": 2, "max_replicas": 20}
DRY: Mapping[str, Any] = {**OPTIONS, "dry_run": True}


def with_config(record: BackendRecord, **config: Any) -> BackendRecord:
    return replace(record, config=BackendConfig(**config))


TEN = replace(
    with_config(backend(), autoscaling_config=OPTIONS), scaled_to=10, scalings=((0.0, 2, 10, "load"),)
)


@each_case(
    ("before", "config", "expected"),
    [
        (TEN, {"autoscaling_config": DRY}, 10),
        (TEN, {"autoscaling_config": DRY, "num_replicas": 3}, 3),
        (replace(TEN, scaled_to=0), {"autoscaling_config": DRY}, 1),
        (backend(num_replicas=5), {"autoscaling_config": DRY}, 5),
        (replace(TEN, is_deleting=True), {"autoscaling_config": DRY}, 1),
        (None, {"autoscaling_config": DRY}, 1),
        (TEN, {"autoscaling_config": {**OPTIONS, "max_replicas": 4}}, 4),
        (TEN, {"num_replicas": 3}, 3),
    ],
)
def test_the_number_is_kept_where_none_is_given(
    before: BackendRecord | None, config: Mapping[str, Any], expected: int
) -> None:
    after = carried_over(with_config(TEN, **config), before, 0.0)
    assert after.num_replicas == expected
    assert carried_over(after, after, 0.0) == after


def test_the_number_and_its_reasons_outlive_a_dry_run() -> None:
    dry = carried_over(with_config(TEN, autoscaling_config=DRY), TEN, 0.0)
    assert carried_over(TEN, dry, 0.0) == TEN


def at_ten(bench: Bench) -> None:
    bench.create(autoscaling_config=OPTIONS)
    bench.settle()
    decide(bench, 10)
    bench.settle()
    assert len(bench.tags()) == 10


def decide(bench: Bench, replicas: int) -> None:
    """Record a decision of the autoscaler, within the bounds or not."""
    record = bench.state.backends["b"]
    assert record.autoscaling is not None
    assert record.scaled_to is not None
    bench.observed.scalings["b"] = Scaling(
        bench.now, record.autoscaling, record.scaled_to, replicas, replicas, "load"
    )


@each_case(
    "change",
    [{"autoscaling_config": None, "num_replicas": 1}, {"autoscaling_config": DRY, "num_replicas": 1}],
)
def test_a_failed_change_that_took_autoscaling_away_brings_the_number_back(change: Mapping[str, Any]) -> None:
    bench = Bench()
    at_ten(bench)
    bench.update(user_config=b"bad", **change)
    assert bench.state.backends["b"].num_replicas == 1
    bench.step()
    bench.now += 61.0
    bench.step()
    record = bench.state.backends["b"]
    assert (record.autoscaling, record.scaled_to) == (AutoscalingConfig(**OPTIONS), 10)
    assert record.scalings[-1][1:3] == (2, 10)


@each_case(("decided", "expected"), [(30, 20), (1, 2), (7, 7)])
def test_every_decision_is_limited_to_the_bounds(decided: int, expected: int) -> None:
    bench = Bench()
    at_ten(bench)
    decide(bench, decided)
    bench.step()
    assert bench.state.backends["b"].scaled_to == expected
