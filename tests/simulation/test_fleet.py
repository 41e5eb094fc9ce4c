"""The simulator: the fluid queue compared with single requests, starting replicas, and other autoscalers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.clock import seeded_rng
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.events import EventQueue
from daskserve.simulation.fleet import Fleet, Service, SimulationResult, duration_parts_s, simulate
from daskserve.simulation.peers import knative_autoscaler
from daskserve.simulation.queueing import FluidQueue, QueueLimits, SimulatedQueue
from daskserve.simulation.trace import Trace


def poisson(mean: float, rng: random.Random) -> int:
    return max(0, round(rng.gauss(mean, math.sqrt(mean)))) if mean > 0 else 0


def load(seconds: int, rate: Callable[[int], float] | float) -> Trace:
    rng = seeded_rng(1)
    rates = [rate(second) if callable(rate) else rate for second in range(seconds)]
    return Trace([poisson(each, rng) for each in rates])


def mean_wait_s(outcome: SimulationResult) -> float:
    waits = outcome.queue.request_counts.waits_ms
    return sum(key * count for key, count in waits.items()) / sum(waits.values()) / 1000


def both(trace: Trace, service: Service, **options: Any) -> tuple[SimulationResult, SimulationResult]:
    """Return the results of the fluid and of the event simulation for the same load."""
    config = AutoscalingConfig(**{"max_replicas": 50, **options})
    return simulate(trace, config, service), simulate(trace, config, service, is_exact=True)


def test_replicas_in_groups_are_simulated_in_groups() -> None:
    config = AutoscalingConfig(min_replicas=3, max_replicas=50, multiple_of=4, upscale_delay_s=5)
    outcome = simulate(load(600, step), config, Service(2, 0.2, start_up_s=5))
    assert outcome.history.running[0] == 4
    assert {each % 4 for each in outcome.history.target} == {0}
    assert max(outcome.history.target) > 8
    wanted, running = (
        next(second for second, count in enumerate(counts) if count > 4)
        for counts in (outcome.history.target, outcome.history.running)
    )
    assert running == wanted + 5


# ---- the fluid compared with events


@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_random_waits_are_close_to_those_of_single_requests(cv: float) -> None:
    fluid, exact = both(load(1000, 32), Service(4, 0.1, cv), max_replicas=1)
    assert mean_wait_s(fluid) == pytest.approx(mean_wait_s(exact), rel=0.5)
    assert fluid.latency_quantile_s(0.99) == pytest.approx(exact.latency_quantile_s(0.99), rel=0.3)


def step(second: int) -> float:
    return 100 if 100 <= second < 300 else 10


def test_a_load_step_gives_the_same_queue() -> None:
    fluid, exact = both(load(600, step), Service(2, 0.2), min_replicas=8, max_replicas=8)
    assert mean_wait_s(fluid) == pytest.approx(mean_wait_s(exact), rel=0.05)
    assert fluid.wait_quantile_s(0.99) == pytest.approx(exact.wait_quantile_s(0.99), rel=0.05)


def test_a_load_step_gives_about_the_same_replicas() -> None:
    """Only approximately, because a single sample can change the number by whole replicas."""
    fluid, exact = both(load(600, step), Service(concurrency=2, duration_s=0.2, start_up_s=10))
    assert mean_wait_s(fluid) == pytest.approx(mean_wait_s(exact), rel=0.25)
    assert max(fluid.history.running) == pytest.approx(max(exact.history.running), rel=0.2)
    assert fluid.replica_hours == pytest.approx(exact.replica_hours, rel=0.2)


def test_long_requests_fill_slots_equally_slowly() -> None:
    fluid, exact = both(load(2000, 1), Service(concurrency=4, duration_s=20.0), max_replicas=1)
    assert fluid.queue.request_counts.completed == pytest.approx(
        exact.queue.request_counts.completed, rel=0.1
    )
    assert mean_wait_s(fluid) == pytest.approx(mean_wait_s(exact), rel=0.1)


@pytest.mark.parametrize("limits", [QueueLimits(max_queued=50), QueueLimits(deadline_s=2)])
def test_equally_many_requests_are_rejected_and_expire(limits: QueueLimits) -> None:
    fluid, exact = both(load(300, 70), Service(4, 0.1, limits=limits), max_replicas=1)
    for name in ("completed", "rejected", "expired"):
        found, truth = getattr(fluid.queue.request_counts, name), getattr(exact.queue.request_counts, name)
        assert found == pytest.approx(truth, rel=0.02, abs=1)
    assert fluid.queue.request_counts.rejected + fluid.queue.request_counts.expired > 5000
    assert fluid.wait_quantile_s(0.5) == pytest.approx(exact.wait_quantile_s(0.5), rel=0.1)


ticks = st.lists(st.tuples(st.floats(0, 500), st.integers(0, 20)), min_size=1, max_size=60)
limit_values = st.builds(
    QueueLimits,
    st.one_of(st.just(math.inf), st.floats(0, 100)),
    st.one_of(st.just(math.inf), st.floats(0.1, 20)),
)


@given(ticks, st.floats(0.001, 30), limit_values, st.booleans())
def test_no_request_is_lost_or_created(
    values: list[tuple[float, int]], duration_s: float, limits: QueueLimits, is_exact: bool
) -> None:
    queue: SimulatedQueue = EventQueue(limits, seeded_rng(1)) if is_exact else FluidQueue(limits)
    came = 0.0
    for second, (arrivals, slots) in enumerate(values):
        arrivals = float(math.floor(arrivals)) if is_exact else arrivals
        came += arrivals
        queue.advance(float(second), 1.0, arrivals, slots, duration_s)
        request_counts = queue.request_counts
        there = (
            request_counts.completed
            + request_counts.rejected
            + request_counts.expired
            + queue.ongoing
            + queue.queued
        )
        assert there == pytest.approx(came, abs=1e-6 * (1 + came))
        assert queue.queued >= 0
        assert queue.queued <= limits.max_queued + 1e-6
    assert all(wait >= 0 for wait in queue.request_counts.waits_ms)
    began = queue.request_counts.completed + queue.ongoing
    assert sum(queue.request_counts.waits_ms.values()) == pytest.approx(began, abs=1e-6 * (1 + came))


def test_slots_of_stopping_replicas_finish_their_requests() -> None:
    fluid, exact = FluidQueue(QueueLimits()), EventQueue(QueueLimits(), seeded_rng(3))
    for second in range(120):
        slots = 40 if second < 60 else 10
        for queue in (fluid, exact):
            queue.advance(float(second), 1.0, 3.0, slots, 20.0)
        if second == 59:
            assert fluid.ongoing == pytest.approx(40, abs=1)
        if second in (70, 90, 119):
            assert fluid.ongoing == pytest.approx(exact.ongoing, abs=6)
    assert fluid.request_counts.completed == pytest.approx(exact.request_counts.completed, rel=0.1)


def test_durations_have_the_given_mean_and_spread() -> None:
    for cv in (0.0, 0.5, 1.0):
        parts = duration_parts_s(0.2, cv)
        mean = sum(parts) / len(parts)
        deviation = math.sqrt(sum((part - mean) ** 2 for part in parts) / len(parts))
        assert mean == pytest.approx(0.2)
        assert deviation / mean == pytest.approx(cv, abs=0.06)


# ---- replicas


def test_replicas_run_after_their_start_up_and_starting_ones_stop_first() -> None:
    fleet = Fleet(2, start_up_s=10)
    fleet.scale(5, now=0)
    fleet.advance(9)
    assert (fleet.running, fleet.existing) == (2, 5)
    fleet.scale(4, now=9)
    fleet.advance(10)
    assert (fleet.running, fleet.existing) == (4, 4)
    fleet.scale(1, now=11)
    assert (fleet.running, fleet.existing) == (1, 1)


def test_from_zero_the_first_requests_wait_only_for_the_start() -> None:
    trace = Trace([0.0] * 30 + [50.0] + [0.0] * 60)
    config = AutoscalingConfig(min_replicas=0, max_replicas=50)
    outcome = simulate(trace, config, Service(concurrency=4, duration_s=0.5, start_up_s=8))
    change = outcome.history.changes[0]
    assert (change.at, change.before, change.after) == (31, 0, 25)
    assert outcome.queue.request_counts.completed == pytest.approx(50)
    assert outcome.wait_quantile_s(1) == pytest.approx(8.8, abs=0.8)


#: Replicas, target, and whether to simulate single requests, which is only fast for small loads.
BOUNDARIES = [
    pytest.param(
        replicas,
        target,
        is_exact,
        marks=[] if replicas in (1, 7) and target in (0.5, 2) else [pytest.mark.nightly],
    )
    for replicas in (1, 2, 3, 7, 20)
    for target in (0.5, 1, 2, 5, 17)
    for is_exact in (False, True)
    if not is_exact or replicas * target <= 20
]


@pytest.mark.parametrize("delay_s", [None, 30])
@pytest.mark.parametrize(("replicas", "target", "is_exact"), BOUNDARIES)
def test_a_constant_load_on_a_boundary_changes_the_number_at_most_once_in_ten_minutes(
    replicas: int, target: float, delay_s: int | None, is_exact: bool
) -> None:
    """The load fits a whole number of replicas exactly, with the noise of single requests."""
    delays = {} if delay_s is None else {"downscale_delay_s": delay_s}
    config = AutoscalingConfig(
        max_replicas=100, initial_replicas=replicas, target_ongoing_requests=target, **delays
    )
    service = Service(concurrency=max(2, math.ceil(2.5 * target)), duration_s=0.1)
    outcome = simulate(load(600, replicas * target / 0.1), config, service, is_exact=is_exact)
    assert len(outcome.history.changes) <= 1, outcome.history.changes


def test_a_burst_scales_up_within_seconds_without_overshooting_tenfold() -> None:
    trace = load(900, lambda second: 500 if second >= 300 else 50)
    outcome = simulate(trace, AutoscalingConfig(max_replicas=400, initial_replicas=3), Service(5, 0.1))
    assert outcome.history.changes[0].at <= 304
    assert outcome.history.changes[1].at <= 308
    assert max(outcome.history.target) <= 2 * 25
    classic = simulate(
        trace, AutoscalingConfig(max_replicas=400, initial_replicas=3, policy="classic"), Service(5, 0.1)
    )
    assert max(classic.history.target) == 400


def test_a_latency_objective_is_kept_without_a_target() -> None:
    trace = load(3600, lambda second: 200 if second >= 600 else 50)
    config = AutoscalingConfig(
        max_replicas=100, initial_replicas=2, policy="latency", policy_kwargs={"objective_s": 0.6}
    )
    outcome = simulate(trace, config, Service(5, 0.1))
    assert 4 < outcome.history.running[-1] < 25
    assert max(outcome.history.wait_s[900:]) < 0.6


def test_the_policy_of_knative_panics_and_recovers() -> None:
    trace = load(900, lambda second: 500 if 300 <= second < 330 else 50)
    config = AutoscalingConfig(max_replicas=400, initial_replicas=3)
    outcome = simulate(trace, config, Service(5, 0.1), name="knative", make=knative_autoscaler)
    up = next(change for change in outcome.history.changes if change.after >= 6)
    assert up.at <= 306
    assert "panic" in up.reason
    assert max(outcome.history.target) > 100
    assert outcome.history.target[-1] <= 8


@each_case("starts_at, options", [(8 * 3600 - 60, {}), (1000.0, {"wall_offset_s": 8 * 3600 - 60 - 1000.0})])
def test_a_schedule_uses_the_time_of_day(starts_at: float, options: dict[str, float]) -> None:
    config = AutoscalingConfig(
        max_replicas=9, policy="schedule", policy_kwargs={"schedule": {"0 8 * * *": 5, "0 9 * * *": 2}},
        upscale_delay_s=0,
    )  # fmt: skip
    outcome = simulate(Trace([1.0] * 120, starts_at=starts_at), config, Service(), **options)
    assert [(change.at, change.after) for change in outcome.history.changes] == [(1, 2), (60, 5)]


def test_the_result_depends_on_the_seed_only() -> None:
    trace = load(300, 20)
    outcomes = [
        simulate(
            trace, AutoscalingConfig(max_replicas=9), Service(4, 0.1), is_exact=True, rng=seeded_rng(seed)
        )
        for seed in (1, 1, 2)
    ]
    first, again, other = (outcome.queue.request_counts.waits_ms for outcome in outcomes)
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"duration_s": 0.0},
        {"duration_s": math.inf},
        {"duration_cv": -1.0},
        {"start_up_s": -1.0},
        {"limits": QueueLimits(-1)},
        {"limits": QueueLimits(1, 0)},
    ],
)
def test_an_invalid_service_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Service(**wrong)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_day_takes_seconds() -> None:
    """It takes under 5 s on an idle machine; the limit is three times that, for a busy one."""
    trace = load(86_400, lambda second: 50 + 40 * math.sin(2 * math.pi * second / 86_400))
    begin = time.process_time()
    simulate(trace, AutoscalingConfig(max_replicas=100), Service(5, 0.1))
    assert time.process_time() - begin < 15
