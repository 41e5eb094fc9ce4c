"""The autoscaler around a policy: bounds, delays, steps to and from zero, and invalid answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.autoscaling import AutoscalingContext, Decision, Sample
from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.options.autoscaling import AutoscalingConfig


class Bench:
    """An autoscaler that runs once per second, and its last target."""

    def __init__(self, *, target: int = 1, policy: Any = None, **options: Any) -> None:
        named = {} if policy is None else {"policy": policy}
        self.config = AutoscalingConfig(**named, **options)
        self.scaler = Autoscaler("b", self.config)
        self.target = target
        self.now = 1000.0
        self.changes: list[tuple[float, int]] = []

    def tick(self, ongoing: float = 0, queued: float = 0, rate: float = 0, **more: Any) -> ScalingStep:
        self.now += 1
        self.scaler.observe(Sample(self.now, ongoing, queued, rate))
        return self.check(**more)

    def check(self, current: int | None = None) -> ScalingStep:
        running = self.target if current is None else current
        step = self.scaler.step(now=self.now, wall=0.0, current=running, target=self.target)
        if step.replicas != self.target:
            self.changes.append((self.now - 1000, step.replicas))
            self.target = step.replicas
        return step

    def run(self, seconds: int, **sample: Any) -> ScalingStep:
        for _ in range(seconds):
            step = self.tick(**sample)
        return step


def wants(*numbers: int) -> Any:
    """Return a policy that wants these numbers in turn, and then repeats the last one."""
    remaining = list(numbers)

    def decide(context: AutoscalingContext) -> Decision:
        return Decision(remaining.pop(0) if len(remaining) > 1 else remaining[0], "because")

    return decide


def test_scaling_up_waits_for_the_delay() -> None:
    bench = Bench(max_replicas=10, upscale_delay_s=30, target_ongoing_requests=2)
    waiting = bench.run(30, ongoing=14)
    assert bench.target == 1
    assert "7" in waiting.reason
    assert "waiting 29 of 30 s before going up from 1" in waiting.reason
    bench.tick(ongoing=14)
    assert bench.changes == [(31, 7)]


def test_scaling_down_waits_for_the_delay() -> None:
    bench = Bench(max_replicas=10, target=7, downscale_delay_s=60, look_back_period_s=5)
    assert "before going down from 7" in bench.run(60, ongoing=4).reason
    assert bench.target == 7
    bench.tick(ongoing=4)
    assert bench.changes == [(61, 2)]


def test_a_check_that_wants_no_change_restarts_the_delay() -> None:
    bench = Bench(policy=wants(*[5] * 20, 1, 5), max_replicas=10, upscale_delay_s=30)
    bench.run(50)
    assert bench.target == 1
    bench.run(3)
    assert bench.changes == [(52, 5)]


def test_a_check_that_wants_the_opposite_restarts_the_delay() -> None:
    policy = wants(*[5] * 20, 2, *[5] * 20, 3, 5)
    bench = Bench(policy=policy, target=3, max_replicas=10, upscale_delay_s=30, downscale_delay_s=5)
    bench.run(72)
    assert bench.changes == []
    bench.run(2)
    assert bench.changes == [(73, 5)]


def test_a_step_down_keeps_the_most_requested_in_the_look_back_period() -> None:
    policy = wants(*[2] * 15, 6, *[2] * 100)
    bench = Bench(policy=policy, target=9, max_replicas=10, downscale_delay_s=20, look_back_period_s=10)
    bench.run(60)
    assert bench.changes == [(21, 6), (42, 2)]


def test_the_classic_policy_goes_down_to_the_number_wanted_now() -> None:
    bench = Bench(policy="classic", target=9, max_replicas=10, downscale_delay_s=3, look_back_period_s=1)
    for ongoing in (14, 14, 14, 4):
        bench.tick(ongoing=ongoing)
    assert bench.changes == [(4, 2)]


def test_the_factors_limit_steps() -> None:
    bench = Bench(policy=wants(90), target=4, max_replicas=100, upscale_delay_s=0, max_upscale_factor=3)
    assert "12 for now, at most 3 times 4" in bench.tick().reason
    bench.run(3)
    assert [number for _, number in bench.changes] == [12, 36, 90]
    bench = Bench(
        policy=wants(1), target=100, max_replicas=100, downscale_delay_s=0, max_downscale_factor=4,
        look_back_period_s=0.5,
    )  # fmt: skip
    bench.run(4)
    assert [number for _, number in bench.changes] == [25, 7, 2, 1]


def test_bounds_apply_without_delay() -> None:
    assert Bench(min_replicas=3, max_replicas=5).tick().replicas == 3
    bench = Bench(target=9, max_replicas=5)
    assert bench.tick(ongoing=99).replicas == 5
    bench = Bench(policy=wants(50), max_replicas=5, upscale_delay_s=0)
    assert "5 at most (max_replicas)" in bench.tick().reason
    assert bench.target == 5


def test_without_metrics_nothing_changes() -> None:
    bench = Bench(target=4, min_replicas=0, max_replicas=9, upscale_delay_s=0, downscale_delay_s=0)
    step = bench.check()
    assert (step.replicas, step.reason) == (4, "no metrics yet")


# ---- zero


def test_the_last_replica_stops_after_a_time_without_requests() -> None:
    bench = Bench(target=3, min_replicas=0, max_replicas=9, downscale_delay_s=5, look_back_period_s=2)
    bench.run(5, ongoing=3)
    bench.run(30)
    assert [number for _, number in bench.changes] == [1, 0]


def test_short_requests_between_checks_keep_the_last_replica() -> None:
    bench = Bench(min_replicas=0, max_replicas=9, downscale_delay_s=5)
    for _ in range(30):
        bench.tick()
        bench.tick(rate=0.2)
    assert bench.changes == []
    assert "stays while there are requests" in bench.check().reason


def test_scaling_to_zero_has_its_own_delay() -> None:
    bench = Bench(min_replicas=0, max_replicas=2, downscale_delay_s=3, downscale_to_zero_delay_s=20)
    assert "idle for 19 of 20 s" in bench.run(20).reason
    bench.tick()
    assert bench.changes == [(21, 0)]


@each_case("policy", ["target_ongoing_requests", "latency"])
def test_scaling_to_zero_keeps_its_own_delay_after_a_burst(policy: str) -> None:
    """Neither the delay of other steps down nor the load of the look-back period counts."""
    kwargs = {"policy_kwargs": {"objective_s": 0.1}} if policy == "latency" else {}
    bench = Bench(
        policy=policy, target=5, min_replicas=0, max_replicas=9, downscale_delay_s=600,
        downscale_to_zero_delay_s=10, look_back_period_s=30, upscale_delay_s=600, **kwargs,
    )  # fmt: skip
    bench.run(20, ongoing=10, rate=10)
    assert "before going down from 5" in bench.run(10).reason
    assert "; 1 first" in bench.tick().reason
    bench.tick()
    assert bench.changes == [(31, 1), (32, 0)]
    bench.run(100)
    assert len(bench.changes) == 2


def test_a_longer_delay_to_zero_counts_from_the_last_request() -> None:
    bench = Bench(target=5, min_replicas=0, max_replicas=9, downscale_delay_s=3, downscale_to_zero_delay_s=60)
    bench.run(20, ongoing=10, rate=10)
    bench.run(100)
    assert bench.changes[-1] == (20 + 60 + 1, 0)
    assert bench.changes[-2][1] == 1


def test_missing_metrics_keep_the_last_replica() -> None:
    """Stale metrics do not count as idle."""
    bench = Bench(policy=wants(0), min_replicas=0, max_replicas=2, downscale_delay_s=30)
    bench.run(5)
    bench.now += 500
    assert bench.check().replicas == 1


def test_from_zero_the_backlog_starts_replicas_at_once() -> None:
    bench = Bench(target=0, min_replicas=0, max_replicas=100, upscale_delay_s=600)
    bench.run(5)
    assert bench.tick(queued=50).replicas == 25


@each_case("policy", ["target_ongoing_requests", "classic"])
def test_requests_that_wait_before_the_first_replica_runs_start_theirs_at_once(policy: str) -> None:
    """The first report of a burst may show only one of its requests."""
    bench = Bench(
        policy=policy, target=0, min_replicas=0, max_replicas=100, upscale_delay_s=600, smoothing_factor=0.5,
        max_upscale_factor=2,
    )  # fmt: skip
    bench.run(5)
    bench.tick(queued=1, current=0)
    bench.tick(queued=50, current=0)
    bench.tick(queued=60, current=0)
    assert [number for _, number in bench.changes] == [1, 25, 30]
    bench.tick(queued=90, current=1)
    assert bench.target == 30, "from the first running replica on, delays count"


def test_replicas_that_are_lost_do_not_make_waiting_requests_urgent() -> None:
    bench = Bench(target=3, min_replicas=0, max_replicas=100, upscale_delay_s=600)
    bench.run(5, ongoing=6, rate=1)
    bench.run(5, queued=50, current=0)
    assert bench.changes == []


def test_from_zero_waiting_requests_override_every_policy() -> None:
    bench = Bench(policy=wants(0), target=0, min_replicas=0, max_replicas=9, upscaling_factor=3)
    step = bench.tick(queued=1)
    assert (step.replicas, step.reason) == (3, "because; 3 for the waiting requests")

    def broken(context: AutoscalingContext) -> int:
        raise RuntimeError("no")

    assert Bench(policy=broken, target=0, min_replicas=0, max_replicas=9).tick(queued=1).replicas == 1


def test_from_zero_nothing_starts_without_requests() -> None:
    bench = Bench(target=0, min_replicas=0, max_replicas=9)
    bench.run(100)
    assert bench.changes == []


# ---- groups of replicas


def test_steps_are_whole_groups() -> None:
    policy = wants(*[5] * 3, *[50] * 3, *[7] * 8, *[1] * 8)
    bench = Bench(
        policy=policy, target=4, max_replicas=15, multiple_of=4, upscale_delay_s=2, downscale_delay_s=3,
        look_back_period_s=1,
    )  # fmt: skip
    assert "8 in whole groups of 4" in bench.tick().reason
    bench.run(4)
    assert "12 at most (max_replicas)" in bench.tick().reason
    bench.run(20)
    assert [number for _, number in bench.changes] == [8, 12, 8, 4]


def test_steps_of_groups_respect_the_factors_and_make_progress() -> None:
    options: dict[str, Any] = {"max_replicas": 60, "multiple_of": 4, "look_back_period_s": 0.5}
    up = Bench(policy=wants(60), target=4, upscale_delay_s=0, max_upscale_factor=1.6, **options)
    up.run(8)
    assert [number for _, number in up.changes] == [8, 12, 16, 24, 36, 56, 60]
    down = Bench(policy=wants(1), target=60, downscale_delay_s=0, max_downscale_factor=1.6, **options)
    down.run(8)
    assert [number for _, number in down.changes] == [40, 28, 20, 16, 12, 8, 4]


def test_the_last_group_stops_and_starts_as_a_whole() -> None:
    bench = Bench(
        target=8, min_replicas=0, max_replicas=8, multiple_of=4, downscale_delay_s=5, look_back_period_s=2,
        downscale_to_zero_delay_s=20,
    )  # fmt: skip
    assert "idle for 9 of 20 s before the last 4 stop" in bench.run(10).reason
    bench.run(20)
    assert [number for _, number in bench.changes] == [4, 0]
    assert bench.tick(queued=1).replicas == 4
    assert "the last 4 stay while there are requests" in bench.run(20, rate=1).reason


def test_a_number_between_groups_is_corrected_at_once() -> None:
    assert Bench(policy=wants(2), target=3, max_replicas=9, multiple_of=2).tick().replicas == 2


# ---- answers


class Lopsided:
    """A policy with arguments and a state."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, int]]:
        seen = context.state.get("seen", 0) + 1
        return self.step * seen, {"seen": seen}


def by_path(context: AutoscalingContext, number: int = 1) -> int:
    return number


def test_a_policy_is_a_function_a_class_or_an_import_path() -> None:
    options: dict[str, Any] = {"max_replicas": 50, "upscale_delay_s": 0}
    bench = Bench(policy=Lopsided, policy_kwargs={"step": 3}, **options)
    bench.run(3)
    assert [number for _, number in bench.changes] == [3, 6, 9]
    config = AutoscalingConfig(policy="test_autoscaler:by_path", policy_kwargs={"number": 4}, **options)
    step = Autoscaler("b", config).step(now=1, wall=1, current=1, target=1)
    assert (step.replicas, step.reason) == (4, "the policy wants 4")


@each_case(
    ("policy", "message"),
    [
        ("nowhere_at_all:f", "cannot be imported"),
        ("test_autoscaler:nothing", "cannot be imported"),
        ("test_autoscaler:__name__", "'test_autoscaler:__name__' is not callable"),
        (b"pickled", "is not callable; give a function, a class"),
        (Lopsided, "does not accept policy_kwargs="),
        ("latency", "does not accept policy_kwargs="),
    ],
)
def test_a_policy_that_does_not_load_raises_an_error_with_the_reason(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Autoscaler("b", AutoscalingConfig(policy=policy))


@each_case("answer", [None, "3", 2.5, -1, True, (1, 2, 3), (1, None), float("nan")])
def test_an_invalid_answer_changes_nothing_and_is_reported(answer: Any) -> None:
    bench = Bench(policy=lambda context: answer, target=4, max_replicas=9)
    step = bench.tick()
    assert step.replicas == 4
    assert "the policy failed, so nothing changes" in step.reason
    assert isinstance(step.error, TypeError | ValueError)


def test_an_exception_of_a_policy_is_in_the_step_and_its_state_is_kept() -> None:
    def moody(context: AutoscalingContext) -> tuple[int, dict[str, int]]:
        seen = context.state.get("seen", 0)
        if context.current_time > 1002:
            raise RuntimeError(f"seen {seen}")
        return 4, {"seen": seen + 1}

    step = Bench(policy=moody, target=4, max_replicas=9).run(5)
    assert "RuntimeError: seen 2" in step.reason
    assert isinstance(step.error, RuntimeError)


def test_an_async_policy_runs_in_an_async_step() -> None:
    async def decide(context: AutoscalingContext) -> int:
        await asyncio.sleep(0)
        return 5

    scaler = Autoscaler("b", AutoscalingConfig(max_replicas=9, upscale_delay_s=0), policy=decide)
    assert asyncio.run(scaler.step_async(now=1, wall=1, current=1, target=1)).replicas == 5
    assert "step_async" in scaler.step(now=2, wall=1, current=1, target=1).reason


def test_a_dry_run_only_reports_its_decision() -> None:
    bench = Bench(policy=wants(5), max_replicas=9, upscale_delay_s=0, dry_run=True)
    step = bench.run(3)
    assert (step.replicas, step.wanted) == (1, 5)
    assert step.reason == "dry run, would go from 1 to 5: because"


def test_an_urgent_decision_does_not_wait() -> None:
    bench = Bench(policy=lambda context: Decision(4, "now", {}, True), max_replicas=9)
    assert bench.tick().replicas == 4


def test_samples_from_before_a_change_are_dropped() -> None:
    seen: list[Sequence[Sample]] = []

    def decide(context: AutoscalingContext) -> int:
        seen.append(context.samples)
        return 2 if len(seen) == 3 else context.target_num_replicas

    bench = Bench(policy=decide, max_replicas=9, upscale_delay_s=0, look_back_period_s=2)
    bench.run(5)
    assert [len(samples) for samples in seen] == [1, 2, 2, 1, 2]


# ---- random loads

sample_values = st.tuples(
    st.floats(0, 1e6, allow_nan=False), st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 20)
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "min_replicas": st.integers(0, 5),
        "max_replicas": st.integers(6, 40),
        "multiple_of": st.integers(1, 3),
        "policy": st.sampled_from(["target_ongoing_requests", "classic"]),
        "upscale_delay_s": st.integers(0, 10),
        "downscale_delay_s": st.integers(0, 10),
        "downscale_to_zero_delay_s": st.integers(0, 10),
        "look_back_period_s": st.integers(1, 10),
        "smoothing_factor": st.floats(0.01, 5),
        "target_ongoing_requests": st.floats(0.01, 100),
        "max_upscale_factor": st.floats(1.01, 10),
        "max_downscale_factor": st.floats(1.01, 10),
        "hysteresis": st.floats(0, 0.9),
        "aggregation_function": st.sampled_from(["mean", "max", "min"]),
    },
)


@given(configs, st.lists(sample_values, max_size=40), st.integers(0, 40))
def test_any_load_keeps_bounds_and_stops_at_one_before_zero(
    options: dict[str, Any], values: list[tuple[float, float, float, int]], first: int
) -> None:
    options = {"max_replicas": 8, **options}
    bounds = AutoscalingConfig(**options).bounds()
    bench = Bench(target=bounds.nearest(first), **options)
    for ongoing, queued, rate, current in values:
        before = bench.target
        step = bench.tick(ongoing, queued, rate, current=current)
        assert bench.config.min_replicas <= step.replicas <= bench.config.max_replicas
        assert step.replicas % bounds.multiple_of == 0
        assert step.error is None
        assert step.reason
        if step.replicas == 0 and before > 0:
            assert before == bounds.multiple_of
            assert (ongoing, queued, rate) == (0, 0, 0)
        if before == 0 and ongoing + queued > 0:
            assert step.replicas > 0


@given(st.integers(1, 50), st.floats(0.1, 20), st.floats(-0.04, 0.04), st.integers(0, 30))
def test_noise_around_a_whole_number_changes_the_number_at_most_once(
    replicas: int, target: float, phase: float, delay_s: int
) -> None:
    bench = Bench(
        max_replicas=100,
        target_ongoing_requests=target,
        upscale_delay_s=delay_s,
        downscale_delay_s=delay_s,
    )
    for second in range(600):
        wave = 0.04 * (-1) ** (second // 40) + phase
        bench.tick(ongoing=replicas * target * (1 + wave), rate=1)
    assert len(bench.changes) <= 1
