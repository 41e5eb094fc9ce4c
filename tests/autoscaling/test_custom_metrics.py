"""Custom metrics: from the values that replicas report to the number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

from daskserve.autoscaling import AutoscalingContext, Decision, Sample
from daskserve.autoscaling.autoscaler import Autoscaler
from daskserve.autoscaling.custom import CustomMetrics, PerReplica
from daskserve.autoscaling.policies import load_policy
from daskserve.control.observed.loads import STALE_S, Loads
from daskserve.options.autoscaling import AutoscalingConfig

BY_TOKENS: dict[str, Any] = {"policy": "custom_metric", "policy_kwargs": {"metric": "tokens", "target": 10}}


def answer(**custom: float) -> dict[str, Any]:
    return {"ongoing": 0, "ended": 0, **({"custom": custom} if custom else {})}


def test_reported_values_are_kept_by_name_until_they_are_stale() -> None:
    loads = Loads()
    loads.answered("b", "b#1", answer(tokens=5.0, age=1.0), 10.0)
    loads.answered("b", "b#2", answer(tokens=7.0), 11.0)
    loads.answered("b", "b#3", answer(), 11.0)
    tags = ["b#1", "b#2", "b#3"]
    assert loads.custom(tags, 11.0) == {"tokens": {"b#1": 5.0, "b#2": 7.0}, "age": {"b#1": 1.0}}
    assert loads.custom(["b#1"], 11.0) == {"tokens": {"b#1": 5.0}, "age": {"b#1": 1.0}}
    assert loads.custom(tags, 10.1 + STALE_S) == {"tokens": {"b#2": 7.0}}
    loads.answered("b", "b#2", answer(), 12.0)
    loads.forget_replica("b#1")
    assert loads.custom(tags, 12.0) == {}


@each_case(("way", "first", "overall"), [("mean", 4.0, 6.0), ("max", 6.0, 8.0), ("min", 2.0, 2.0)])
def test_values_are_aggregated_over_time_and_then_over_replicas(
    way: str, first: float, overall: float
) -> None:
    metrics = CustomMetrics(10)
    for at, values in enumerate(({"b#1": 99.0}, {"b#1": 2.0, "gone": 50.0}, {"b#1": 6.0, "b#2": 8.0})):
        metrics.observe(at, {"tokens": values})
    found = metrics.views(0, way)
    assert found.newest == {"tokens": {"b#1": 6.0, "b#2": 8.0}}
    assert found.aggregated == {"tokens": {"b#1": first, "b#2": 8.0}}
    assert found.overall == {"tokens": overall}
    assert repr(found.overall) == repr({"tokens": overall})
    assert (len(found.aggregated), "tokens" in found.overall, found.aggregated.get("x")) == (1, True, None)


def test_values_that_are_no_longer_reported_are_dropped() -> None:
    metrics = CustomMetrics(10)
    metrics.observe(1, {"tokens": {"b#1": 1.0}})
    metrics.observe(2, {})
    assert metrics.views(0, "mean").aggregated == {}
    metrics.observe(3, {"age": {"b#1": 1.0}})
    assert metrics.views(0, "mean").aggregated == {"age": {"b#1": 1.0}}
    assert metrics.views(3, "mean").newest == {}


def test_huge_values_can_be_averaged() -> None:
    metrics = CustomMetrics(10)
    for at in (1, 2):
        metrics.observe(at, {"tokens": {"b#1": 1e308, "b#2": 1e308}})
    assert metrics.views(0, "mean").overall == {"tokens": 1e308}


def ask(
    values: dict[str, float], *, target: int, current: int | None = None, name: str = "tokens", **options: Any
) -> Decision:
    kwargs = {"metric": "tokens", "target": 10, **options}
    config = AutoscalingConfig(max_replicas=100, policy="custom_metric", policy_kwargs=kwargs)
    running = target if current is None else current
    reported = {name: values} if values else {}
    decision = load_policy(config)(
        AutoscalingContext("b", config, 1000, 0, running, target, aggregated_metrics=reported)
    )
    assert isinstance(decision, Decision)
    return decision


def three(value: float) -> dict[str, float]:
    return {f"b#{number}": value for number in range(3)}


@each_case(
    ("value", "wanted"),
    [(10, 3), (10.9, 3), (11.1, 4), (20, 6), (7, 3), (6, 2), (0, 0), (-5, 0)],
)
def test_the_number_is_the_sum_divided_by_the_target(value: float, wanted: int) -> None:
    assert ask(three(value), target=3).replicas == wanted


def test_the_reason_contains_the_values() -> None:
    assert ask(three(20), target=3).reason == "sum of tokens over 3 replicas is 60, 10 per replica wanted: 6"


def test_a_value_that_all_replicas_share_is_not_summed() -> None:
    assert ask({"b#1": 40, "b#2": 20}, target=2, across="max").replicas == 4
    assert ask({"b#1": 40, "b#2": 20}, target=2, across="mean").replicas == 3


def test_a_silent_replica_prevents_scaling_down_but_not_up() -> None:
    less = ask({"b#1": 1.0}, target=3)
    assert less.replicas == 3
    assert "2 report nothing, so not fewer than 3" in less.reason
    assert ask({"b#1": 90.0}, target=3).replicas == 9
    assert ask({"b#1": 1.0}, target=3, current=1).replicas == 1


@each_case(("target", "current"), [(3, 3), (3, 0), (0, 0)])
def test_without_values_the_number_stays(target: int, current: int) -> None:
    found = ask({}, target=target, current=current)
    assert found.replicas == target
    assert f"none of {current} replicas reports tokens" in found.reason
    assert "they report toke," in ask({"b#1": 1.0}, target=3, name="toke").reason


@each_case(
    ("kwargs", "said"),
    [
        ({}, "needs a metric"),
        ({"metric": "tokens"}, "needs a metric"),
        ({"metric": "tokens", "target": 1, "goal": 2}, "does not accept policy_kwargs"),
        ({"metric": "", "target": 1}, "metric is ''"),
        ({"metric": "tokens", "target": 0}, "above 0"),
        ({"metric": "tokens", "target": True}, "above 0"),
        ({"metric": "tokens", "target": float("nan")}, "above 0"),
        ({"metric": "tokens", "target": 1, "across": "median"}, "one of sum, mean, max"),
    ],
)
def test_invalid_arguments_are_refused(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_policy(AutoscalingConfig(policy="custom_metric", policy_kwargs=kwargs))


class Bench:
    """An autoscaler that runs once per second."""

    def __init__(self, **options: Any) -> None:
        options = {"max_replicas": 10, "look_back_period_s": 10, **options}
        self.scaler = Autoscaler("b", AutoscalingConfig(**options))
        self.target = 1
        self.now = 1000.0

    def run(self, seconds: int, values: PerReplica | None, *, running: int | None = None) -> str:
        reason = ""
        for _ in range(seconds):
            self.now += 1
            self.scaler.observe(Sample(self.now, 1, 0), custom=values)
            current = self.target if running is None else running
            step = self.scaler.step(now=self.now, wall=0, current=current, target=self.target)
            assert step.error is None
            self.target, reason = step.replicas, step.reason
        return reason


def test_the_usual_delays_apply_to_a_custom_metric() -> None:
    bench = Bench(**BY_TOKENS, upscale_delay_s=5, downscale_delay_s=20)
    bench.run(5, {"tokens": {"b#1": 40.0}})
    assert bench.target == 1
    bench.run(1, {"tokens": {"b#1": 40.0}})
    assert bench.target == 4
    # As with any policy, values from before the change are dropped.
    bench.run(10, {"tokens": dict.fromkeys(("b#1", "b#2", "b#3", "b#4"), 10.0)})
    assert bench.target == 4
    bench.run(31, {"tokens": dict.fromkeys(("b#1", "b#2", "b#3", "b#4"), 2.0)})
    assert bench.target == 1
    assert "none of 1 replica reports tokens, so 1 stay" in bench.run(60, None)


def test_custom_policies_get_all_views() -> None:
    seen: list[AutoscalingContext] = []

    def note(context: AutoscalingContext) -> int:
        seen.append(context)
        return context.target_num_replicas

    bench = Bench(policy=note, look_back_period_s=1000)
    bench.run(1, {"tokens": {"b#1": 10.0, "b#2": 50.0}}, running=2)
    bench.run(1, {"tokens": {"b#1": 20.0, "b#2": 50.0}}, running=2)
    context = seen[-1]
    assert context.raw_metrics == {"tokens": {"b#1": 20.0, "b#2": 50.0}}
    assert context.aggregated_metrics == {"tokens": {"b#1": 15.0, "b#2": 50.0}}
    assert context.custom == {"tokens": 32.5}
    bench.scaler.step(now=bench.now + 100, wall=0, current=2, target=1)
    assert seen[-1].raw_metrics == seen[-1].aggregated_metrics == seen[-1].custom == {}
