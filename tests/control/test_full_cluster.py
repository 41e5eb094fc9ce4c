"""Updates where no new replica fits beside the old ones: one old replica at a time makes room."""

from __future__ import annotations

from typing import Any

from control_harness import Bench, replica, worker
from full_cluster import (
    BOOM,
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
from daskserve.control.backend.step import NEW_WORKER_S
from daskserve.control.placement.placement import TentativeUsage, demand_of
from daskserve.control.records.records import GoalState
from daskserve.errors import NoCapacityError
from daskserve.payload.packed_errors import load_error

NO_ROOM = "no room for a new replica beside the old ones: draining one old replica at a time"


def test_one_old_replica_at_a_time_makes_room_and_the_status_says_so() -> None:
    bench = full()
    goal = deploy(bench, "2")
    (stop,) = bench.step().actions
    assert isinstance(stop, StopReplica)
    assert message(bench).startswith(f"{NO_ROOM}; a replica needs CPU 1")
    assert bench.step().actions == [stop]  # the stop is repeated, and no other replica stops
    bench.succeed(stop)
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    assert start.replica.worker == stop.replica.worker
    assert message(bench) == f"{NO_ROOM}; 0 of 2 replicas are updated"
    assert bench.step().actions == [start]  # the next old replica stays until this new one runs
    bench.succeed(start)
    (second,) = bench.step().actions
    assert isinstance(second, StopReplica)
    bench.succeed(second)
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench) == ["2", "2"]
    assert message(bench) == ""
    assert bench.observed.notes_of("b").full_since is None


def test_no_replica_stops_first_where_one_more_has_room() -> None:
    bench = full()
    bench.observed.workers["w3"] = worker(3, threads=1)
    deploy(bench, "2")
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    bench.settle()
    assert message(bench) == ""
    assert versions(bench, S.RUNNING) == ["2", "2"]


def test_without_a_surge_one_old_replica_at_a_time_stops_although_there_is_room() -> None:
    bench = full(2, max_surge=0)
    bench.observed.workers["w3"] = worker(3)
    goal = deploy(bench, "2", max_surge=0)
    most = 0
    while bench.goal(goal).state is GoalState.PENDING:
        step = bench.step()
        assert len(step.actions) <= 1
        for action in step.actions:
            bench.succeed(action)
        most = max(most, len(bench.tags()))
        if "1" in versions(bench):
            assert message(bench).startswith("max_surge is 0: draining one old replica at a time; ")
            assert len(bench.tags(S.RUNNING)) >= 1
    assert most == 2
    assert versions(bench, S.RUNNING) == ["2", "2"]


@each_case(("max_surge", "most"), [(2, 6), ("50%", 6), ("10%", 5), ("100%", 8)])
def test_the_surge_is_a_number_or_a_percentage(max_surge: int | str, most: int) -> None:
    bench = full(4)
    for number in range(5, 9):
        bench.observed.workers[f"w{number}"] = worker(number)
    goal, found = deploy(bench, "2", 4, max_surge=max_surge), 0
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        found = max(found, len(bench.tags(S.STARTING, S.RUNNING)))
        assert len(bench.tags(S.RUNNING)) >= 4
    assert found == most


def test_a_new_version_that_fails_costs_one_old_replica_until_it_is_rolled_back() -> None:
    bench = full(3)
    goal = deploy(bench, "2", 3)
    for _ in range(100):
        step_with_failing_starts(bench, "2")
        assert len(bench.tags(S.RUNNING)) >= 2
    assert bench.goal(goal).state is GoalState.FAILED
    assert versions(bench, S.RUNNING) == ["1"] * 3


def test_a_second_replica_of_a_version_that_fails_is_rolled_back_without_room() -> None:
    """One new replica serves, and the other's constructor fails: the old version replaces both."""
    bench = full(2)
    goal, failures = deploy(bench, "2"), 0
    for _ in range(100):
        for action in bench.step().actions:
            is_new = isinstance(action, StartReplica) and action.replica.named_version == "2"
            if is_new and versions(bench, S.RUNNING) == ["2"]:
                failures += 1
                bench.observed.failed[action.replica.tag] = BOOM
            else:
                bench.succeed(action)
        assert bench.tags(S.RUNNING)
    assert failures == 6
    assert bench.goal(goal).state is GoalState.FAILED
    assert versions(bench, S.RUNNING) == ["1", "1"]


def test_a_new_version_that_never_starts_takes_down_one_old_replica() -> None:
    bench = full(3)
    goal = deploy(bench, "2", 3, timeout_s=30.0)
    for _ in range(20):
        for action in bench.step().actions:
            if isinstance(action, StopReplica):
                bench.succeed(action)
        bench.now += 1
    assert versions(bench) == ["1", "1", "2"]
    bench.now += 10
    bench.settle()
    assert bench.goal(goal).state is GoalState.FAILED
    assert versions(bench, S.RUNNING) == ["1"] * 3


@each_case("replicas", [3, 4])
def test_a_version_that_cannot_fit_drains_nothing(replicas: int) -> None:
    bench = full(2)
    goal = deploy(bench, "2", replicas)
    assert bench.step().actions == []
    assert message(bench).startswith("a replica needs CPU 1")
    bench.now += 60
    bench.settle()
    assert isinstance(load_error(bench.goal(goal).error or b""), NoCapacityError)
    assert versions(bench, S.RUNNING) == ["1", "1"]


def test_smaller_and_more_replicas_take_the_places_of_larger_ones() -> None:
    bench = full(2)
    goal = deploy(bench, "2", 4, num_cpus=0.5)
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench, S.RUNNING) == ["2"] * 4


def test_the_least_busy_old_replica_is_drained() -> None:
    bench = full(3)
    busy = dict(zip(bench.tags(), (3, 1, 2), strict=True))
    for tag, ongoing in busy.items():
        bench.observed.loads.answered("b", tag, {"ongoing": ongoing, "ended": 0}, bench.now)
    deploy(bench, "2", 3)
    (stop,) = bench.step().actions
    assert busy[stop.replica.tag] == 1


def test_an_old_replica_whose_room_does_not_help_is_not_drained() -> None:
    """The new version needs both threads of a worker, and another backend holds one of the first worker's."""
    bench = Bench([worker(1, threads=2), worker(2, threads=2)])
    deploy(bench, "1", 2)
    bench.settle()
    bench.state.apply({"replica/x#1": replica("x#1", demand={"CPU": 1.0})})
    deploy(bench, "2", 1, num_cpus=2, max_surge=0)
    here, there = (bench.state.replicas_on(each)[0] for each in ("w1", "w2"))
    trial, workers = TentativeUsage(bench.state, {}), bench.observed.cleared_workers()
    found = replicas_to_drain(
        bench.state.backends["b"], [here, there], trial, workers, demand_of(bench.state.backends["b"]), {}
    )
    assert found == (there,)


def test_a_worker_lost_during_the_update_drains_no_other_replica_until_it_returns() -> None:
    bench = full(3)
    goal = deploy(bench, "2", 3, timeout_s=None)
    (stop,) = bench.step().actions
    bench.succeed(stop)
    (start,) = bench.step().actions
    lost = start.replica.worker
    assert lost is not None
    info = bench.observed.workers.pop(lost)
    bench.observed.lost_workers.add(lost)
    for _ in range(5):
        assert bench.step().actions == []
        assert versions(bench, S.RUNNING) == ["1", "1"]
    bench.observed.lost_workers.clear()
    bench.observed.workers[lost] = info
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench, S.RUNNING) == ["2"] * 3


def test_an_autoscaled_backend_whose_load_needs_more_than_fits_is_updated() -> None:
    config = {"min_replicas": 1, "max_replicas": 10, "initial_replicas": 10}
    bench = Bench([worker(each, threads=1) for each in (1, 2, 3)])
    deploy(bench, "1", autoscaling_config=config)
    bench.settle()
    bench.state.apply({"goal/goal-1": None})
    record = bench.state.backends["b"]
    assert versions(bench, S.RUNNING) == ["1"] * 3
    config["initial_replicas"] = 2
    goal = deploy(bench, "2", autoscaling_config=config)
    assert bench.state.backends["b"].num_replicas == record.num_replicas == 10
    served = set()
    for _ in range(30):
        for action in bench.step().actions:
            bench.succeed(action)
        served.add(len(bench.tags(S.RUNNING)))
    assert min(served) == 2
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench, S.RUNNING) == ["2"] * 3


@each_case("more", [{}, {"placement_group_bundles": [{"CPU": 2}]}])
def test_old_replicas_whose_room_is_of_no_use_stop_although_the_load_needs_more(more: dict[str, Any]) -> None:
    """On workers with three threads, an old replica of one thread stays beside a new one of two threads."""
    config = {"min_replicas": 1, "max_replicas": 10, "initial_replicas": 10}
    bench = Bench([worker(each, threads=3) for each in (1, 2)])
    deploy(bench, "1", autoscaling_config=config)
    bench.settle()
    assert versions(bench, S.RUNNING) == ["1"] * 6
    bench.state.apply({"goal/goal-1": None})
    config["initial_replicas"] = 2
    goal = deploy(bench, "2", num_cpus=2, autoscaling_config=config, **more)
    for _ in range(40):
        for action in bench.step().actions:
            bench.succeed(action)
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench, S.RUNNING) == ["2"] * 2


def test_an_adaptive_cluster_has_time_to_add_a_worker_first() -> None:
    bench = full(1)
    bench.observed.is_adaptive = True
    deploy(bench, "2", 1)
    step = bench.step()
    assert step.actions == []
    assert step.wake_at == bench.now + NEW_WORKER_S
    assert message(bench).startswith(f"{NO_ROOM}, once no worker has joined for 20 s; ")
    bench.now += NEW_WORKER_S / 2
    assert bench.step().actions == []
    bench.now += NEW_WORKER_S / 2
    assert [type(each) for each in bench.step().actions] == [StopReplica]
    bench.settle()
    assert versions(bench, S.RUNNING) == ["2"]


def test_a_worker_that_joins_in_time_saves_the_old_replica_until_the_new_one_runs() -> None:
    bench = full(1)
    bench.observed.is_adaptive = True
    goal = deploy(bench, "2", 1)
    bench.step()
    bench.observed.workers["w2"] = worker(2, threads=1)
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        assert bench.tags(S.RUNNING)


@each_case("max_surge", [0, 1])
def test_replicas_on_a_retiring_worker_are_replaced_before_they_stop(max_surge: int) -> None:
    bench = full(2, max_surge=max_surge)
    bench.observed.workers["w3"] = worker(3, threads=1)
    bench.observed.workers["w1"] = worker(1, threads=1, is_retiring=True)
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    assert start.replica.worker == "w3"
    bench.settle()
    assert {each.worker for each in bench.state.replicas_of("b")} == {"w2", "w3"}


def test_a_replica_whose_own_process_got_sigterm_is_replaced_before_it_stops() -> None:
    bench = full(2)
    bench.observed.workers["w1"] = worker(1, threads=2)
    (leaving,) = [each for each in bench.state.replicas_of("b") if each.worker == "w1"]
    bench.observed.terminating.add(leaving.tag)
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    bench.settle()
    found = {each.tag for each in bench.state.replicas_of("b")}
    assert (len(found), leaving.tag in found) == (2, False)
    assert bench.observed.terminating == set()


@given(
    replicas=st.integers(1, 4),
    spare=st.integers(0, 2),
    max_surge=st.integers(0, 2),
    max_unavailable=st.integers(0, 2),
    luck=st.lists(st.sampled_from(["all", "one", "fail", "lose", "nothing"]), max_size=25),
)
def test_an_update_ends_and_no_more_replicas_are_missing_than_may_be(
    replicas: int, spare: int, max_surge: int, max_unavailable: int, luck: list[str]
) -> None:
    """Starts fail or hang, and workers are lost and return, at random for a while."""
    bench = Bench([worker(each + 1, threads=1) for each in range(replicas + spare)])
    pace = {"max_surge": max_surge, "max_unavailable": max_unavailable}
    deploy(bench, "1", replicas, **pace)
    bench.settle()
    goal = deploy(bench, "2", replicas, timeout_s=None, **pace)
    missing = max_unavailable or (1 if max_surge == 0 or spare == 0 else 0)
    for event in luck:
        before = len(bench.tags(S.RUNNING))
        actions = bench.step().actions
        stopped = before - len(bench.tags(S.RUNNING))
        if stopped > 0:
            assert stopped == 1 or before - stopped >= replicas - max_unavailable
            assert len(bench.tags(S.RUNNING)) >= replicas - missing
        if event == "lose":
            lose_first(bench)
            continue
        play(bench, actions, event)
    bench.settle()
    bench.now += 100  # past the pause after a failure
    bench.settle()
    version = "2" if bench.goal(goal).state is GoalState.DONE else "1"
    assert bench.goal(goal).state is not GoalState.PENDING
    assert versions(bench, S.RUNNING) == versions(bench) == [version] * replicas
    assert bench.observed.notes_of("b").full_since is None


@each_case("max_unavailable", [0, 1])
def test_a_replica_that_needs_the_room_of_two_gets_it_whatever_may_be_missing(max_unavailable: int) -> None:
    bench = full(4, threads=2)
    goal = deploy(bench, "2", 2, num_cpus=2, max_unavailable=max_unavailable)
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert versions(bench) == ["2", "2"]
