"""Updates to larger replicas on a full cluster: several old ones of one worker make room for a new one."""

from __future__ import annotations

from typing import Any

from control_harness import Bench, replica, worker
from full_cluster import (
    deploy,
    full,
    lose_first,
    message,
    play,
    step_with_failing_starts,
    versions,
)
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend.actions import StartReplica, StopReplica
from daskserve.control.backend.rollout import replicas_to_drain
from daskserve.control.placement.placement import TentativeUsage, demand_of
from daskserve.control.records.records import GoalState


def crowded(workers: int, **fields: Any) -> Bench:
    """Return a bench whose workers have two threads, and two replicas of an autoscaled deployment each."""
    return full(2 * workers, threads=2, autoscaling_config=scaled_to(2 * workers), **fields)


def scaled_to(replicas: int) -> dict[str, int]:
    return {"min_replicas": 1, "max_replicas": 10, "initial_replicas": replicas}


def test_two_old_replicas_of_one_worker_make_room_for_one_that_needs_both() -> None:
    bench = crowded(2)
    goal = deploy(bench, "2", num_cpus=2, autoscaling_config=scaled_to(2))
    stops = bench.step().actions
    assert [type(each) for each in stops] == [StopReplica] * 2
    assert len({each.replica.worker for each in stops}) == 1  # type: ignore[union-attr]
    assert message(bench).startswith(
        "no room for a new replica beside the old ones: draining 2 old replicas of one worker at a time; "
    )
    bench.succeed(stops[0])
    assert bench.step().actions == [stops[1]]
    bench.succeed(stops[1])
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    assert bench.step().actions == [start]  # the other worker's replicas serve until this one runs
    assert len(bench.tags(S.RUNNING)) == 2
    bench.succeed(start)
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench, S.RUNNING) == ["2", "2"]
    notes = bench.observed.notes_of("b")
    assert (notes.full_since, notes.drained_at_once) == (None, 1)


def test_a_larger_version_that_fails_gives_the_room_back_to_all_that_were_drained() -> None:
    bench = crowded(2)
    goal = deploy(bench, "2", num_cpus=2, autoscaling_config=scaled_to(2))
    for _ in range(30):
        step_with_failing_starts(bench, "2")
        assert len(bench.tags(S.RUNNING)) >= 2
    assert bench.goal(goal).state is GoalState.FAILED
    assert versions(bench, S.RUNNING) == ["1"] * 4


def test_without_a_surge_one_old_replica_stops_where_the_new_one_has_room_on_another_worker() -> None:
    """Stopping one old replica makes no room on its worker for a new one; the other worker is empty."""
    bench = full(2, threads=2, max_surge=0)
    bench.observed.workers["w2"] = worker(2, threads=2)
    goal = deploy(bench, "2", num_cpus=2, max_surge=0)
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        assert bench.tags(S.RUNNING)
    assert versions(bench, S.RUNNING) == ["2", "2"]


@each_case(
    ("busy", "drained"),
    [
        ({"small": 0, "large": 0, "other": 0}, ["other"]),  # one large replica is fewer than two small ones
        ({"small": 1, "large": 3, "other": 9}, ["other"]),
    ],
)
def test_as_few_old_replicas_as_possible_are_drained(busy: dict[str, float], drained: list[str]) -> None:
    assert drain({"w1": {"small": 1.0, "large": 2.0}, "w2": {"other": 3.0}}, busy) == drained


def test_of_two_workers_with_as_many_to_drain_the_less_busy_one_is_drained() -> None:
    worker_loads = {"w1": {"a": 1.5, "b": 1.5}, "w2": {"c": 1.5, "d": 1.5}}
    assert drain(worker_loads, {"a": 1, "b": 1, "c": 0, "d": 1}) == ["c", "d"]


def test_an_idle_old_replica_too_small_to_help_is_not_drained_with_the_one_that_does() -> None:
    assert drain({"w1": {"idle": 0.5, "large": 2.5}}, {"large": 5}, num_cpus=2) == ["large"]


def drain(
    worker_loads: dict[str, dict[str, float]], busy: dict[str, float], num_cpus: float = 3
) -> list[str]:
    """Return the old replicas to stop for a new one, given all by worker with their demand."""
    bench = Bench([worker(number + 1, threads=3) for number in range(len(worker_loads))])
    deploy(bench, "2", 1, num_cpus=num_cpus)
    old = [
        replica(tag, version="1", worker=address, demand={"CPU": demand}, backend="b")
        for address, crowd in worker_loads.items()
        for tag, demand in crowd.items()
    ]
    bench.state.apply({each.key: each for each in old})
    record = bench.state.backends["b"]
    found = replicas_to_drain(
        record,
        old,
        TentativeUsage(bench.state, {}),
        bench.observed.cleared_workers(),
        demand_of(record),
        busy,
    )
    return [each.tag for each in found]


@given(
    workers=st.integers(1, 3),
    needed=st.integers(1, 3),
    max_surge=st.integers(0, 1),
    luck=st.lists(st.sampled_from(["all", "one", "fail", "lose", "nothing"]), max_size=25),
)
def test_an_update_to_replicas_of_twice_the_size_ends_and_drains_one_worker_at_a_time(
    workers: int, needed: int, max_surge: int, luck: list[str]
) -> None:
    bench = crowded(workers, max_surge=max_surge)
    goal = deploy(
        bench,
        "2",
        num_cpus=2,
        autoscaling_config=scaled_to(min(needed, workers)),
        max_surge=max_surge,
        timeout_s=None,
    )
    for event in luck:
        running = {each.tag: each.worker for each in bench.state.replicas_of("b") if each.state is S.RUNNING}
        actions = bench.step().actions
        stopped = {worker for tag, worker in running.items() if tag not in bench.tags(S.RUNNING)}
        if bench.goal(goal).state is GoalState.PENDING:
            assert len(stopped) <= 1
            assert not stopped or not bench.tags(S.STARTING)
        if event == "lose":
            lose_first(bench)
            continue
        play(bench, actions, event)
    bench.settle()
    bench.now += 100
    bench.settle()
    version = "2" if bench.goal(goal).state is GoalState.DONE else "1"
    assert bench.goal(goal).state is not GoalState.PENDING
    assert versions(bench, S.RUNNING) == [version] * (workers if version == "2" else 2 * workers)
    notes = bench.observed.notes_of("b")
    assert (notes.full_since, notes.drained_at_once) == (None, 1)
