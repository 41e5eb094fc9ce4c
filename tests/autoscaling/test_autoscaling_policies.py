"""The built-in policies as pure functions."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.autoscaling import AutoscalingContext, Decision, Sample
from daskserve.autoscaling.cron import CronExpression
from daskserve.autoscaling.latency import quantile_of
from daskserve.autoscaling.policies import load_policy
from daskserve.options.autoscaling import AutoscalingConfig

PROMETHEUS: dict[str, Any] = {
    "policy": "promql",
    "prometheus_address": "http://p:9090",
    "prometheus_queries": {"lag": "sum(lag)", "age": "max(age)"},
}


def ask(
    *samples: Sample,
    now: float = 1000.0,
    target: int = 1,
    current: int | None = None,
    wall: float = 0.0,
    queries: dict[str, float] | None = None,
    state: Any = None,
    bounds_s: tuple[float, ...] = (),
    **options: Any,
) -> Decision:
    options.setdefault("max_replicas", 100)
    options.setdefault("min_replicas", 0)
    config = AutoscalingConfig(**options)
    context = AutoscalingContext(
        "b",
        config,
        now,
        wall,
        target if current is None else current,
        target,
        samples,
        queries=queries or {},
        state=state or {},
        latency_bounds_s=bounds_s,
    )
    found = load_policy(config)(context)
    assert isinstance(found, Decision)
    return found


def seen(*numbers: float, **more: Any) -> list[Sample]:
    """Return samples with these numbers of ongoing requests, one per second up to now."""
    return [Sample(1001.0 - len(numbers) + at, ongoing, 0, **more) for at, ongoing in enumerate(numbers)]


# ---- load


@each_case("policy", ["classic", "target_ongoing_requests"])
@each_case(
    ("present", "total", "options", "wanted"),
    [
        (1, 20, {}, 10),
        (4, 8, {}, 4),
        (4, 9, {}, 5),
        (10, 0, {}, 0),
        (10, 7, {}, 4),
        (10, 30, {"smoothing_factor": 0.5}, 13),
        (10, 30, {"upscaling_factor": 0.2, "smoothing_factor": 0.9}, 11),
        (10, 10, {"downscaling_factor": 0.5}, 8),
        (10, 16, {"downscaling_factor": 0.01}, 9),
        (10, 30, {"upscaling_factor": 2}, 20),
        (0, 7, {"smoothing_factor": 0.1}, 4),
        (0, 0, {}, 0),
    ],
)
def test_the_number_is_the_load_divided_by_the_target(
    policy: str, present: int, total: float, options: dict[str, Any], wanted: int
) -> None:
    assert ask(*seen(total), target=present, policy=policy, **options).replicas == wanted


def test_the_classic_policy_follows_noise_and_ours_does_not() -> None:
    for total, classic in ((9.6, 5), (8.1, 5), (7.9, 4), (5.9, 3)):
        assert ask(*seen(total), target=4, policy="classic").replicas == classic
    assert ask(*seen(8.7), target=4).replicas == 4
    assert ask(*seen(8.9), target=4).replicas == 5
    assert ask(*seen(5.9), target=4).replicas == 4
    assert ask(*seen(5.4), target=4).replicas == 3


@each_case(("how", "wanted"), [("mean", 3), ("max", 6), ("min", 1)])
def test_load_is_aggregated_with_the_config_function(how: str, wanted: int) -> None:
    assert ask(*seen(2, 4, 12), target=20, aggregation_function=how).replicas == wanted


def test_the_reason_contains_the_load() -> None:
    assert ask(*seen(12, 13), policy="classic").reason == (
        "12.5 requests ongoing or queued over 1 s, 2 per replica wanted: 7"
    )


def test_a_queue_counts_as_the_load_of_working_it_off() -> None:
    """Ten replicas run 5 requests of 0.1 s each, 500 per second; 600 arrive per second, and 2,000 wait."""
    queue = [Sample(990.0 + at, 50, 1000 + 100 * at, 500) for at in range(11)]
    found = ask(*queue, target=10)
    # 600/s of 0.1 s each occupy 60 slots, and 2,000 of 0.1 s within 10 s occupy 20.
    assert found.replicas == 40
    assert "2000.0 queued and 600.0 more per s, of 0.1 s each: 80.0 concurrent requests" in found.reason
    assert ask(*queue, target=10, policy="classic").replicas == 775
    assert ask(*queue, target=10, drain_period_s=2).replicas == 80


def test_requests_that_all_began_at_once_do_not_count_as_slow() -> None:
    """Each takes 0.1 s. None ends in the first second, so their mean seems to be 0.125 s."""
    begun = [Sample(995.0 + at, 50, 1000, 500 if at > 1 else 0) for at in range(6)]
    assert "of 0.1 s each" in ask(*begun, target=10).reason


def test_a_queue_that_is_gone_is_no_load() -> None:
    gone = [*(Sample(990.0 + at, 50, 900 - 100 * at, 600) for at in range(10)), Sample(1000.0, 50, 0, 550)]
    assert ask(*gone, target=10).replicas == 22
    assert ask(*gone, target=10, policy="classic").replicas == 230


def test_replicas_that_have_just_started_do_not_count_as_slow() -> None:
    queue = [Sample(990.0 + at, 15, 100 * at, 150) for at in range(11)]
    before = ask(*queue, target=30, current=3)
    assert before.state == {"each_runs": 5}
    assert ask(*queue, target=30, current=30, state=before.state) == before
    assert ask(*queue, target=30, current=30).replicas > 2 * before.replicas


def test_replicas_that_cannot_reach_the_target_count_with_their_real_capacity() -> None:
    queue = [Sample(990.0 + at, 40, 100 * at, 400) for at in range(11)]
    # 500/s of 0.1 s and 1,000 of 0.1 s within 10 s occupy 60 slots of replicas with 4 each.
    assert ask(*queue, target=10, target_ongoing_requests=10).replicas == 15


def test_a_queue_is_counted_when_no_requests_end() -> None:
    queue = [Sample(990.0 + at, 10, 50, 0) for at in range(11)]
    assert ask(*queue, target=5).replicas == 30


def test_a_burst_does_not_wait() -> None:
    calm, burst = seen(*[2] * 27, 20, 20, 20), seen(*[2] * 27, 3, 3, 3)
    assert ask(*calm).is_urgent
    assert ask(*calm).replicas == 6
    assert not ask(*burst).is_urgent
    assert not ask(*calm, burst_window_s=0).is_urgent
    assert not ask(*calm, upscale_delay_s=30).is_urgent, "bursts wait for an explicit delay"
    assert ask(*calm, upscale_delay_s=30, burst_window_s=6).is_urgent
    assert not ask(*seen(20, 20)).is_urgent, "two samples are not a burst"


# ---- latency

BOUNDS_S = (0.1, 0.2, 0.4, 0.8)


def test_quantiles_are_interpolated_within_a_bucket() -> None:
    assert quantile_of([50, 50, 0, 0, 0], BOUNDS_S, 0.25) == pytest.approx(0.05)
    assert quantile_of([50, 50, 0, 0, 0], BOUNDS_S, 0.75) == pytest.approx(0.15)
    assert quantile_of([0, 0, 0, 0, 1], BOUNDS_S, 0.5) == math.inf
    assert quantile_of([0, 4, 0, 0, 0], BOUNDS_S, 0.5) == pytest.approx(0.15)


def latency(counts: tuple[int, ...], **more: Any) -> Decision:
    sample = Sample(1000.0, 5, more.pop("queued", 0), more.pop("rate", 100), counts)
    more.setdefault("policy_kwargs", {"objective_s": 0.2, "quantile": 0.9})
    return ask(sample, policy="latency", bounds_s=BOUNDS_S, **more)


def test_a_missed_objective_scales_up_in_proportion_but_at_most_twofold() -> None:
    slow = latency((80, 0, 20, 0, 0), target=10)
    assert slow.replicas == 15
    assert slow.reason == "p90 is 0.3 s, 0.2 s wanted: 15"
    assert latency((0, 0, 0, 0, 9), target=10).replicas == 20
    assert latency((0, 0, 0, 0, 9), target=10).is_urgent


def test_waiting_requests_count_as_slow() -> None:
    assert latency((9, 0, 0, 0, 0), target=10, queued=30).replicas == 15


def test_a_low_latency_tries_fewer_replicas_and_remembers_what_was_too_few() -> None:
    tried = latency((99, 0, 0, 0, 0), target=10)
    assert tried.replicas == 9
    assert tried.state["good"] == (10.0, 1000.0)
    known = {"bad": (11.0, 900.0)}
    assert latency((99, 0, 0, 0, 0), target=10, state=known).replicas == 10
    assert latency((99, 0, 0, 0, 0), target=10, state={"bad": (11.0, -4000.0)}).replicas == 9
    assert latency((99, 0, 0, 0, 0), target=10, state={"good": (25.0, 900.0)}).replicas == 4


def test_a_latency_near_the_objective_changes_nothing_nor_does_one_of_starting_replicas() -> None:
    assert latency((0, 99, 0, 0, 0), target=10).replicas == 10
    assert latency((0, 0, 0, 0, 9), target=10, current=6).replicas == 10


def test_without_latencies_nothing_changes_and_without_requests_all_replicas_may_stop() -> None:
    assert latency((), target=10).replicas == 10
    assert latency((9, 0, 0, 0, 0), target=10, rate=0).replicas == 0


SLOW, QUICK = (0, 0, 99, 0, 0), (99, 0, 0, 0, 0)


@each_case(
    ("counts", "options", "replicas", "state"),
    [
        # Too slow: the current rate per replica becomes the bad rate, unless a lower rate was already bad.
        (SLOW, {}, 19, {"bad": (10.0, 1000.0)}),
        (SLOW, {"state": {"bad": (8.0, 900.0)}}, 19, {"bad": (8.0, 1000.0)}),
        (SLOW, {"state": {"bad": (12.0, 900.0)}}, 19, {"bad": (10.0, 1000.0)}),
        (SLOW, {"state": {"bad": (8.0, 1000.0 - 3600.0)}}, 19, {"bad": (10.0, 1000.0)}),
        (SLOW, {"state": {"good": (10.0, 900.0)}}, 19, {"bad": (10.0, 1000.0)}),
        (SLOW, {"state": {"good": (9.0, 900.0)}}, 19, {"good": (9.0, 900.0), "bad": (10.0, 1000.0)}),
        (SLOW, {"rate": 0, "state": {"good": (9.0, 900.0)}}, 19, {"good": (9.0, 900.0)}),
        ((0, 89, 10, 0, 0), {"target": 1, "rate": 10}, 2, {"bad": (10.0, 1000.0)}),
        # Quick: the current rate per replica becomes the good rate, unless a higher rate was already good.
        (QUICK, {}, 9, {"good": (10.0, 1000.0)}),
        (QUICK, {"target": 30, "rate": 300}, 27, {"good": (10.0, 1000.0)}),
        (QUICK, {"target": 1, "rate": 10}, 1, {"good": (10.0, 1000.0)}),
        (QUICK, {"state": {"good": (20.0, 900.0)}}, 5, {"good": (20.0, 1000.0)}),
        (QUICK, {"state": {"good": (5.0, 900.0)}}, 9, {"good": (10.0, 1000.0)}),
        # The next trial is between the good rate and the bad rate.
        (QUICK, {"state": {"bad": (20.0, 900.0)}}, 8, {"bad": (20.0, 900.0), "good": (10.0, 1000.0)}),
        (
            QUICK,
            {"state": {"bad": (20.0, 900.0), "good": (18.0, 900.0)}},
            6,
            {"bad": (20.0, 900.0), "good": (18.0, 1000.0)},
        ),
        (QUICK, {"rate": 0, "state": {"good": (9.0, 900.0)}}, 0, {"good": (9.0, 900.0)}),
        ((0, 99, 0, 0, 0), {"state": {"bad": (9.0, 900.0)}}, 10, {"bad": (9.0, 900.0)}),
    ],
)
def test_the_load_of_a_replica_is_learned_from_each_step(
    counts: tuple[int, ...], options: dict[str, Any], replicas: int, state: dict[str, Any]
) -> None:
    found = latency(counts, **{"target": 10, **options})
    assert (found.replicas, found.state) == (replicas, state)


def test_very_high_latency_is_urgent_unless_bursts_are_off() -> None:
    assert not latency((0, 0, 99, 0, 0), target=10).is_urgent
    assert latency((0, 0, 0, 99, 0), target=10).is_urgent
    assert not latency((0, 0, 0, 99, 0), target=10, burst_window_s=0).is_urgent


def test_nothing_is_decided_without_metrics_and_one_replica_starts_for_what_waits() -> None:
    options: dict[str, Any] = {"policy": "latency", "policy_kwargs": {"objective_s": 0.2}}
    known = {"good": (9.0, 900.0)}
    none = ask(target=4, state=known, **options)
    assert (none.replicas, none.reason, none.state) == (4, "no metrics yet since the last change", known)
    for policy in ("classic", "target_ongoing_requests"):
        assert ask(target=4, policy=policy).replicas == 4
        assert ask(target=4, policy=policy).reason == "no metrics yet"
    asleep = ask(Sample(1000.0, 0, 3), target=0, state=known, **options)
    assert (asleep.replicas, asleep.reason, asleep.state) == (1, "3 requests wait", known)
    assert ask(Sample(1000.0, 0, 0), target=0, **options).replicas == ask(target=0, **options).replicas == 0


def test_requests_that_do_not_end_are_slow_once_they_take_longer_than_wanted() -> None:
    options: dict[str, Any] = {"policy": "latency", "policy_kwargs": {"objective_s": 2.0}, "target": 4}
    assert ask(*seen(5, 5, 5, 5), bounds_s=BOUNDS_S, **options).replicas == 8
    assert ask(*seen(5, 5, 5), bounds_s=BOUNDS_S, **options).replicas == 4, "not for longer yet"
    assert ask(*seen(5, 0, 5, 5), bounds_s=BOUNDS_S, **options).replicas == 4, "idle in between"
    assert ask(*seen(5, 5, 5, 5, rate=1.0), bounds_s=BOUNDS_S, **options).replicas == 4, "some end"


@each_case("kwargs", [{"objective_s": 0}, {"objective_s": 1, "quantile": 95}])
def test_an_invalid_objective_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give "):
        latency((), policy_kwargs=kwargs)


# ---- PromQL


def test_the_query_that_needs_the_most_replicas_decides() -> None:
    kwargs = {"targets": {"lag": 100, "age": 10}}
    found = ask(queries={"lag": 450.0, "age": 30.0}, policy_kwargs=kwargs, **PROMETHEUS)
    assert (found.replicas, found.reason) == (
        5, "lag is 450, 100 per replica wanted; age is 30, 10 per replica wanted: 5",
    )  # fmt: skip


def test_a_missing_value_never_removes_replicas() -> None:
    kwargs = {"targets": {"lag": 100, "age": 10}}
    found = ask(queries={"lag": 100.0}, target=4, policy_kwargs=kwargs, **PROMETHEUS)
    assert found.replicas == 4
    assert "no fresh value of age, so not fewer than 4" in found.reason
    assert ask(queries={"lag": 900.0, "age": math.nan}, policy_kwargs=kwargs, **PROMETHEUS).replicas == 9


@each_case("targets", [{}, {"lag": 0}, {"lag": "many"}, {"lag": math.nan}, {"other": 1}])
def test_invalid_targets_are_refused(targets: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ask(policy_kwargs={"targets": targets}, **PROMETHEUS)


# ---- schedules

HALF_HOUR = timedelta(minutes=30)


def scheduled(at: datetime, *samples: Sample, **kwargs: Any) -> Decision:
    kwargs.setdefault("schedule", {"0 8 * * mon-fri": 10, "0 18 * * *": 2})
    return ask(*samples, policy="schedule", wall=at.timestamp(), policy_kwargs=kwargs, target=3)


def test_an_entry_applies_until_the_time_of_another_one() -> None:
    friday = datetime(2024, 3, 8, tzinfo=UTC)
    assert scheduled(friday.replace(hour=7, minute=59)).replicas == 2
    assert scheduled(friday.replace(hour=8)).replicas == 10
    assert scheduled(friday.replace(hour=18)).replicas == 2
    saturday = scheduled(friday.replace(day=9, hour=12))
    assert (saturday.replicas, saturday.reason) == (2, '2 by the schedule entry "0 18 * * *"')


def test_of_entries_with_equal_times_the_last_one_is_in_force() -> None:
    noon = datetime(2024, 3, 8, 12, tzinfo=UTC)
    lines = {"0 8 * * *": 4, "0  8 * * *": 5, "0 7 * * *": 6}
    assert scheduled(noon, schedule=lines).replicas == 5


def test_a_schedule_uses_its_time_zone() -> None:
    zone = ZoneInfo("Europe/Berlin")
    for day in (datetime(2024, 3, 28, 8, tzinfo=zone), datetime(2024, 4, 2, 8, tzinfo=zone)):
        assert scheduled(day, timezone="Europe/Berlin").replicas == 10
    assert scheduled(datetime(2024, 4, 2, 5, 59, tzinfo=UTC), timezone="Europe/Berlin").replicas == 2


def test_a_schedule_can_be_bounds_of_another_policy() -> None:
    noon, night = datetime(2024, 3, 8, 12, tzinfo=UTC), datetime(2024, 3, 8, 22, tzinfo=UTC)
    lines = {"0 8 * * *": 4, "0 18 * * *": {"min_replicas": 1, "max_replicas": 6}}
    both: dict[str, Any] = {"schedule": lines, "policy": "classic"}
    assert scheduled(noon, *seen(2), **both).replicas == 4
    assert scheduled(noon, *seen(40), **both).replicas == 20
    assert scheduled(night, *seen(2), **both).replicas == 1
    found = scheduled(night, *seen(40), **both)
    assert found.replicas == 6
    assert found.reason.endswith('wanted: 20; 6 at most by the schedule entry "0 18 * * *"')


@each_case(
    "kwargs",
    [
        {"schedule": {}},
        {"schedule": {"0 8 * *": 1}},
        {"schedule": {"0 25 * * *": 1}},
        {"schedule": {"0 8 * * mon-sun": 1}},
        {"schedule": {"0 8 30 feb *": 1}},
        {"schedule": {"0 0 8 * * *": 1}},
        {"schedule": {"0 0 */20 * 1l": 1}},
        {"schedule": {"0 8 * * *": -1}},
        {"schedule": {"0 8 * * *": {"replicas": 1}}},
        {"schedule": {"0 8 * * *": {"min_replicas": 3, "max_replicas": 2}}},
        {"schedule": {"0 8 * * *": 1}, "timezone": "Mars/Base"},
        {"schedule": {"0 8 * * *": 1}, "policy": "schedule"},
    ],
)
def test_an_invalid_schedule_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        scheduled(datetime(2024, 3, 8, tzinfo=UTC), **kwargs)


@each_case(
    ("line", "at", "last"),
    [
        ("*/15 * * * *", "2024-03-08 12:14", "2024-03-08 12:00"),
        ("5-10/5,50 9-17 * * *", "2024-03-08 09:07", "2024-03-08 09:05"),
        ("5-10/5,50 9-17 * * *", "2024-03-08 09:04", "2024-03-07 17:50"),
        ("0 0 1 * *", "2024-03-08 09:04", "2024-03-01 00:00"),
        ("0 0 13 * fri", "2024-03-09 09:04", "2024-03-08 00:00"),
        ("0 0 * * 7", "2024-03-08 09:04", "2024-03-03 00:00"),
        ("0 0 29 2 *", "2024-02-28 09:04", "2020-02-29 00:00"),
        ("30 6 * jan,JUL *", "2024-03-08 09:04", "2024-01-31 06:30"),
    ],
)
def test_cron_expressions_have_the_meaning_of_cron(line: str, at: str, last: str) -> None:
    assert CronExpression.parse(line).last_before(datetime.fromisoformat(at)) == datetime.fromisoformat(last)


def test_a_bad_cron_expression_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"'61 8 \* \* \*' is not a cron expression \(Bad minute\); give minute, "
    ):
        CronExpression.parse("61 8 * * *")
    with pytest.raises(ValueError, match=r"'0 8' is not a cron expression; give five fields: minute, hour, "):
        CronExpression.parse("0 8")


def test_a_schedule_follows_the_wall_clock_when_daylight_saving_begins_and_ends() -> None:
    """A time in the skipped hour applies from the end of that hour; a repeated hour runs twice."""
    berlin: dict[str, Any] = {"schedule": {"30 2 * * *": 5, "0 3 * * *": 1}, "timezone": "Europe/Berlin"}
    found = [scheduled(datetime(2024, 10, 27, 0, 15, tzinfo=UTC) + n * HALF_HOUR, **berlin) for n in range(5)]
    assert [each.replicas for each in found] == [1, 5, 1, 5, 1]  # 2:15, 2:45, 2:15, 2:45, 3:15
    skipped: dict[str, Any] = {"schedule": {"30 2 * * *": 5, "0 1 * * *": 1}, "timezone": "Europe/Berlin"}
    found = [scheduled(datetime(2024, 3, 31, 0, 45, tzinfo=UTC) + n * HALF_HOUR, **skipped) for n in range(2)]
    assert [each.replicas for each in found] == [1, 5]  # 1:45, 3:15


@given(st.text(max_size=20))
def test_any_text_is_a_cron_expression_or_a_value_error(text: str) -> None:
    try:
        CronExpression.parse(text)
    except ValueError:
        pass
