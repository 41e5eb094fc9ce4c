"""One backend, step by step, from its target state to running replicas, with all failures on the way."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from control_harness import Bench, backend, endpoint, removed, replica, state_of, worker
from tables import each_case

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend.actions import ReconfigureReplica, StartReplica, StopReplica
from daskserve.control.backend.step import (
    MAX_START_RETRY_S,
    START_RETRY_S,
    replica_tag,
)
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.observed.observed import Notes
from daskserve.control.records.records import BackendRecord, GoalState, ReplicaRecord
from daskserve.control.views.backends import backend_status
from daskserve.control.views.published import published_backend
from daskserve.errors import (
    DeployError,
    NoCapacityError,
    ReplicaStartError,
    RequestTimeoutError,
)
from daskserve.options.backend import BackendConfig
from daskserve.payload.packed_errors import load_error

BOOM = ReplicaStartError("the constructor raised", user_traceback="Traceback ...")


def running(**fields: Any) -> Bench:
    """Return a bench whose backend ``b`` runs as it was created."""
    bench = Bench()
    bench.create(**fields)
    bench.settle()
    assert {each.state for each in bench.state.replicas_of("b")} == {S.RUNNING}
    return bench


def deployed(**fields: Any) -> Bench:
    bench = Bench()
    bench.deploy(**fields)
    bench.settle()
    return bench


def wish_of(bench: Bench) -> BackendRecord:
    """Return the target state of the backend, without its history."""
    return replace(bench.state.backends["b"], last_error="")


def kinds(actions: list[Any]) -> list[type[Any]]:
    return [type(each) for each in actions]


def fail(bench: Bench, error: BaseException = BOOM) -> None:
    """Let every starting replica fail."""
    for action in bench.step().actions:
        if isinstance(action, StartReplica):
            bench.observed.failed[action.replica.tag] = error


def error_of(bench: Bench, goal_id: str) -> BaseException:
    packed = bench.goal(goal_id).error
    assert packed is not None
    return load_error(packed)


# ---- creating


def test_a_replica_is_placed_started_and_then_runs() -> None:
    bench = Bench()
    goal = bench.create(version="1")
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    record = start.replica
    assert (record.state, record.version, record.worker, record.incarnation) == (S.STARTING, "1", "w1", 1)
    assert bench.state.replicas_of("b") == [record]
    assert bench.goal(goal).state is GoalState.PENDING
    assert re.fullmatch("b#[A-Za-z]{6}", record.tag)

    assert bench.step().actions == [start]  # repeated, because the start has not been confirmed
    bench.observed.ready[record.tag] = {}
    last = bench.step()
    assert bench.tags(S.RUNNING) == [record.tag]
    assert last.actions == []
    assert bench.goal(goal).state is GoalState.DONE
    assert bench.state.backends["b"].goal is None


def test_a_step_at_rest_has_no_changes_and_no_actions() -> None:
    bench = running(num_replicas=3)
    step = bench.decide()
    assert (step.change, step.actions, step.wake_at) == ({}, [], None)


def test_the_placement_is_written_before_a_replica_starts() -> None:
    bench = Bench()
    bench.create(num_replicas=2)
    step = bench.decide()
    written = [record for record in step.change.values() if isinstance(record, ReplicaRecord)]
    assert [action.replica for action in step.actions] == written
    assert {each.worker for each in written} == {"w1", "w2"}
    assert len({each.incarnation for each in written}) == 2


def test_a_goal_is_done_only_when_all_replicas_run() -> None:
    bench = Bench()
    goal = bench.create(num_replicas=2)
    first, second = bench.step().actions
    bench.succeed(first)
    bench.step()
    assert bench.goal(goal).state is GoalState.PENDING
    bench.succeed(second)
    bench.step()
    assert bench.goal(goal).state is GoalState.DONE


def test_a_step_does_not_change_the_state() -> None:
    bench = running(num_replicas=2)
    bench.update(num_replicas=5)
    bench.observed.lost_workers.add("w1")
    before = dict(bench.state.replicas)
    bench.decide()
    assert bench.state.replicas == before
    for where in ("w1", "w2"):
        assert bench.state.used(where) == {"CPU": pytest.approx(0.1)}


def test_a_step_that_raises_does_not_change_the_state() -> None:
    """After one invalid worker entry, the resource usage must not include replicas that were never placed."""
    bench = Bench()
    bench.create(num_replicas=2)
    bench.observed.workers["broken"] = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        bench.decide()
    assert bench.state.replicas == {}
    assert bench.state.used("w1") == {}


def test_tags_are_unique() -> None:
    class SameSeeds(random.Random):
        def getrandbits(self, k: int) -> int:
            return 7

    bench = Bench()
    bench.rng = SameSeeds()
    bench.create(num_replicas=1)
    bench.step()
    bench.update(num_replicas=2)
    bench.step()
    first = replica_tag("b", 7, 0)
    assert len(bench.tags()) == 2
    assert bench.tags()[0] == first


# ---- constructors that fail


def test_two_failures_are_tolerated() -> None:
    bench = Bench()
    goal = bench.create()
    fail(bench)
    fail(bench)
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert len(bench.tags(S.RUNNING)) == 1


def test_an_error_of_the_cluster_becomes_a_deploy_error() -> None:
    bench = Bench()
    goal = bench.create()
    for _ in range(3):
        fail(bench, KeyError("oops"))
    bench.step()
    error = error_of(bench, goal)
    assert type(error) is DeployError
    assert "A replica of backend 'b' could not be created: KeyError: 'oops'" in str(error)


def test_the_failure_of_one_replica_stops_the_others() -> None:
    bench = Bench()
    goal = bench.create(num_replicas=4, max_constructor_retry_count=3)
    starts = bench.step().actions
    bench.succeed(starts[0])
    for action in starts[1:]:
        bench.observed.failed[action.replica.tag] = BOOM
    step = bench.step()
    assert bench.goal(goal).state is GoalState.FAILED
    (stop,) = step.actions
    assert isinstance(stop, StopReplica)
    assert stop.grace_s == 0
    bench.settle()
    assert (bench.state.backends, bench.state.replicas) == ({}, {})


def test_without_a_goal_retries_back_off() -> None:
    """A running backend has lost its worker, and its constructor now fails; no caller waits."""
    bench = running()
    bench.observed.lost_workers.add("w1")
    pauses = []
    for _ in range(9):
        fail(bench)
        bench.observed.lost_workers.clear()
        before = bench.now
        step = bench.step()
        assert step.wake_at is not None
        assert bench.tags() == []
        waiting = bench.observed.notes["b"].waiting or ""
        assert "trying again in" in waiting
        assert "the constructor raised" in waiting
        bench.now = step.wake_at
        pauses.append(step.wake_at - before)
    assert pauses[:4] == [START_RETRY_S, 2 * START_RETRY_S, 4 * START_RETRY_S, 8 * START_RETRY_S]
    assert pauses[-1] == MAX_START_RETRY_S
    bench.settle()
    assert len(bench.tags(S.RUNNING)) == 1
    assert replace(bench.observed.notes["b"], dead=()) == Notes()


def test_a_new_spec_is_tried_immediately_even_if_the_old_one_failed_often() -> None:
    bench = deployed(version="1")
    bench.observed.lost_workers.add("w1")
    for _ in range(4):
        fail(bench)
        bench.observed.lost_workers.clear()
        bench.step()
        bench.now = bench.observed.notes["b"].retry_at or 0.0
    fail(bench)
    bench.step()
    assert bench.observed.notes["b"].is_pausing(bench.now)
    bench.deploy(version="2")
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    assert start.replica.version == "2"


def test_failures_of_an_older_version_do_not_count_against_the_newer() -> None:
    bench = Bench()
    bench.deploy(version="1", num_replicas=3)
    starts = bench.step().actions
    goal = bench.deploy(version="2", num_replicas=3)
    for action in starts:
        bench.observed.failed[action.replica.tag] = BOOM
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert {each.version for each in bench.state.replicas_of("b")} == {"2"}


def test_failures_do_not_restore_a_backend_that_is_being_deleted() -> None:
    bench = Bench()
    bench.create(num_replicas=3)
    starts = bench.step().actions
    goal = bench.delete()
    for action in starts:
        bench.observed.failed[action.replica.tag] = BOOM
    bench.settle()
    assert bench.state.backends == {}
    assert bench.goal(goal).state is GoalState.DONE


def test_a_failed_reconfiguration_does_not_restore_a_backend_that_is_being_deleted() -> None:
    bench = running()
    bench.update(user_config=b"new")
    (action,) = bench.step().actions
    goal = bench.delete()
    bench.observed.reconfigure_failed[action.replica.tag] = BOOM
    bench.settle()
    assert bench.state.backends == {}
    assert bench.goal(goal).state is GoalState.DONE


# ---- running out of time


def test_without_capacity_a_backend_waits_and_says_what_is_missing() -> None:
    bench = Bench()
    goal = bench.create(num_replicas=2, actor_options={"num_cpus": 3, "num_gpus": 1})
    step = bench.step()
    assert step.actions == []
    assert "GPU 1 (most free on one worker: 0)" in (bench.observed.notes["b"].waiting or "")
    assert bench.tags(S.SHOULD_START) == bench.tags()
    assert bench.goal(goal).state is GoalState.PENDING
    assert step.wake_at == bench.now + 30  # to log what it waits for


def test_replicas_that_fit_start_while_the_rest_waits() -> None:
    bench = Bench([worker(1, threads=2)])
    bench.create(num_replicas=3, actor_options={"num_cpus": 1})
    assert len(bench.step().actions) == 2
    assert len(bench.tags(S.SHOULD_START)) == 1


def test_without_capacity_the_goal_fails_at_the_deadline_and_removes_the_backend() -> None:
    bench = Bench()
    goal = bench.create(num_replicas=3, actor_options={"num_cpus": 4}, timeout_s=5.0)
    starts = bench.step().actions
    assert len(starts) == 2
    bench.succeed(starts[0])
    bench.now += 4.9
    bench.step()
    assert bench.goal(goal).state is GoalState.PENDING
    bench.now += 0.1
    bench.step()
    error = error_of(bench, goal)
    assert isinstance(error, NoCapacityError)
    assert str(error).startswith(
        "Cannot scale backend 'b' to 3 replicas within 5 s: a replica needs CPU 4 "
        "(most free on one worker: 0); 2 workers were considered."
    )
    bench.settle()
    state = bench.state
    assert (state.backends, state.replicas, state.codes) == ({}, {}, {})
    assert bench.observed.notes == {}


def test_a_change_with_a_time_limit_fails_while_its_constructor_runs() -> None:
    bench = Bench()
    goal = bench.create(timeout_s=5.0)
    bench.step()
    bench.now += 5
    bench.step()
    error = error_of(bench, goal)
    assert isinstance(error, RequestTimeoutError)
    assert "did not reach 1 running replica within 5 s. Pass a larger timeout_s, or omit it" in str(error)


def test_a_change_without_capacity_is_rolled_back() -> None:
    bench = running(num_replicas=2, actor_options={"num_cpus": 3})
    before = wish_of(bench)
    goal = bench.update(num_replicas=3)
    bench.step()
    bench.now += 60
    bench.settle()
    assert isinstance(error_of(bench, goal), NoCapacityError)
    assert wish_of(bench) == before
    assert len(bench.tags(S.RUNNING)) == 2
    assert len(bench.tags()) == 2


# ---- workers that go


def test_lost_workers_count_as_failed_starts_once_however_many_replicas_they_take() -> None:
    """A constructor may end its worker repeatedly."""
    bench = Bench([worker(1)])
    goal = bench.create(num_replicas=3, max_constructor_retry_count=2)
    for count in (1, 2):
        assert len(bench.step().actions) == 3
        bench.observed.lost_workers = {"w1"}
        bench.step()
        bench.observed.lost_workers = set()
        assert bench.goal(goal).failures == {"b": count}
    error = error_of(bench, goal)
    assert isinstance(error, DeployError)
    assert "lost before the change was complete: worker w1 left the cluster" in str(error)


def test_a_lost_worker_gets_no_replicas() -> None:
    """The worker rejoined under its old address before all of its lost replicas were handled."""
    bench = running()
    bench.observed.lost_workers.add("w1")
    step = bench.step()
    assert [action.replica.worker for action in step.actions] == ["w2"]


@each_case("state", [S.STARTING, S.RUNNING, S.STOPPING])
def test_a_lost_replica_is_removed_in_every_state(state: S) -> None:
    bench = Bench([worker(2)])
    bench.create()
    bench.state.apply({"replica/b#1": replica("b#1", state, version=bench.state.backends["b"].version)})
    bench.observed.lost_workers.add("w1")
    assert "replica/b#1" in removed(bench.step().change)


# ---- changing the config


def published_tags(bench: Bench) -> list[str]:
    return [tag for tag, *_ in published_backend(bench.state, "b")["replicas"]]


def test_a_change_of_the_user_config_reconfigures_the_same_replicas_one_by_one() -> None:
    """A replica that is being reconfigured gets no requests."""
    bench = running(num_replicas=2)
    tags = bench.tags()
    goal = bench.update(user_config=b"new")
    (first,) = bench.step().actions
    assert type(first) is ReconfigureReplica
    assert published_tags(bench) == [tag for tag in tags if tag != first.replica.tag]
    assert [each.replica.tag for each in bench.step().actions] == [first.replica.tag]
    bench.succeed(first)
    (second,) = bench.step().actions
    assert second.replica.tag != first.replica.tag
    assert published_tags(bench) == [first.replica.tag]
    assert bench.goal(goal).state is GoalState.PENDING
    bench.succeed(second)
    assert bench.step().actions == []
    assert bench.goal(goal).state is GoalState.DONE
    assert bench.tags(S.RUNNING) == tags
    assert {each.config_id for each in bench.state.replicas_of("b")} == {bench.state.backends["b"].config_id}
    assert published_tags(bench) == tags


@each_case(("limit", "at_once"), [(0, 1), (1, 1), (2, 2), ("75%", 3), (9, 4)])
def test_max_unavailable_says_how_many_are_reconfigured_at_a_time(limit: int | str, at_once: int) -> None:
    bench = running(num_replicas=4, max_unavailable=limit)
    bench.update(user_config=b"new")
    actions = bench.step().actions
    assert len(actions) == at_once
    assert len(published_tags(bench)) == 4 - at_once
    bench.succeed(actions[0])
    assert len(bench.step().actions) == min(at_once, 3)


def test_a_change_of_options_alone_reaches_all_replicas_at_once_while_they_serve() -> None:
    bench = running(num_replicas=3, user_config=b"same")
    bench.update(max_concurrent_queries=7)
    assert kinds(bench.step().actions) == [ReconfigureReplica] * 3
    assert len(published_tags(bench)) == 3
    assert kinds(bench.step().actions) == [ReconfigureReplica] * 3


def test_a_new_controller_continues_with_the_replica_that_is_being_reconfigured() -> None:
    """The new controller knows only the replica's record."""
    bench = running(num_replicas=3)
    bench.update(user_config=b"new")
    (first,) = bench.step().actions
    before, bench.observed = bench.observed, type(bench.observed)()
    bench.observed.workers, bench.observed.ready = before.workers, before.ready
    assert [each.replica.tag for each in bench.step().actions] == [first.replica.tag]


def test_a_reconfiguration_waits_for_a_replica_that_starts_but_not_for_ever() -> None:
    """If a worker is lost meanwhile, no second replica stops serving."""
    bench = running(num_replicas=3)
    bench.update(user_config=b"new")
    (first,) = bench.step().actions
    bench.succeed(first)
    (second,) = bench.step().actions
    bench.observed.failed[second.replica.tag] = BOOM
    (start,) = bench.step().actions
    assert type(start) is StartReplica
    assert bench.step().actions == [start]
    bench.succeed(start)
    bench.settle()
    assert {each.config_id for each in bench.state.replicas_of("b")} == {bench.state.backends["b"].config_id}


def test_a_started_replica_reports_what_the_callable_of_an_import_path_is() -> None:
    """If the callable is async, its replicas run 100 requests at a time, without a restart."""
    bench = Bench()
    goal = bench.create(num_replicas=2)
    assert bench.state.backends["b"].config.concurrency() == 8
    first, second = bench.step().actions
    facts = {"is_blocking": False, "is_asgi_app": True, "accepts_batches": False, "methods": ["__call__"]}
    for action in (first, second):
        bench.observed.ready[action.replica.tag] = facts
    actions = bench.step().actions
    config = bench.state.backends["b"].config
    assert config.concurrency() == 100
    assert config.internal_metadata.is_asgi_app
    actions = actions or bench.step().actions
    assert kinds(actions) == [ReconfigureReplica, ReconfigureReplica]
    for action in actions:
        bench.succeed(action)
    assert bench.step().actions == []
    assert bench.goal(goal).state is GoalState.DONE


def test_a_change_that_does_not_concern_replicas_is_done_immediately() -> None:
    bench = running()
    goal = bench.update(max_queued_requests=7)
    assert bench.step().actions == []
    assert bench.goal(goal).state is GoalState.DONE


def test_a_replica_that_rejects_a_config_fails_the_change_and_rolls_back_the_others() -> None:
    bench = running(num_replicas=3)
    before = wish_of(bench)
    goal = bench.update(user_config=b"new")
    (first,) = bench.step().actions
    bench.succeed(first)
    (second,) = bench.step().actions
    bench.observed.reconfigure_failed[second.replica.tag] = BOOM
    step = bench.step()
    assert isinstance(error_of(bench, goal), ReplicaStartError)
    assert wish_of(bench) == before
    # The failed replica may have applied a part of the config, so it is rolled back first.
    assert [(type(each), each.replica.tag) for each in step.actions] == [
        (ReconfigureReplica, second.replica.tag)
    ]
    bench.succeed(step.actions[0])
    assert [each.replica.tag for each in bench.step().actions] == [first.replica.tag]
    bench.settle()
    assert {each.config_id for each in bench.state.replicas_of("b")} == {before.config_id}


# ---- scaling down and deleting


def test_scaling_down_stops_the_least_busy_replicas_first() -> None:
    bench = Bench([worker(1, threads=3)])
    bench.create(num_replicas=5, actor_options={"num_cpus": 1})
    starts = bench.step().actions
    bench.succeed(starts[0])
    bench.step()
    run, starting, waiting = bench.tags(S.RUNNING), bench.tags(S.STARTING), bench.tags(S.SHOULD_START)
    assert (len(run), len(starting), len(waiting)) == (1, 2, 2)
    bench.update(num_replicas=3)
    assert bench.step().actions == starts[1:]
    assert bench.tags() == run + starting
    bench.update(num_replicas=1)
    step = bench.step()
    assert [(type(each), each.replica.tag) for each in step.actions] == [
        (StopReplica, tag) for tag in starting
    ]
    bench.settle()
    assert bench.tags() == run


def test_scaling_down_is_done_when_the_last_one_is_gone() -> None:
    bench = running(num_replicas=2)
    goal = bench.update(num_replicas=1)
    (stop,) = bench.step().actions
    bench.step()
    assert bench.goal(goal).state is GoalState.PENDING
    bench.succeed(stop)
    bench.step()
    assert bench.goal(goal).state is GoalState.DONE
    assert len(bench.tags()) == 1


def test_deleting_has_no_deadline() -> None:
    bench = running()
    goal = bench.delete()
    bench.step()
    bench.now += 1e6
    assert bench.step().wake_at is None
    assert bench.goal(goal).state is GoalState.PENDING


def test_a_backend_can_be_recreated_while_it_is_being_deleted() -> None:
    bench = running(version="1")
    first = bench.delete()
    bench.step()
    second = bench.create(version="2", request_id="again")
    assert bench.goal(first).state is GoalState.DONE
    bench.settle()
    assert bench.goal(second).state is GoalState.DONE
    assert [each.version for each in bench.state.replicas_of("b")] == ["2"]
    assert list(bench.state.codes) == ["b@2"]


# ---- versions


def test_a_new_version_that_fails_leaves_the_old_one_running() -> None:
    bench = deployed(version="1", num_replicas=2)
    before = wish_of(bench)
    tags = bench.tags(S.RUNNING)
    goal = bench.deploy(version="2", num_replicas=2)
    for _ in range(6):
        assert bench.goal(goal).state is GoalState.PENDING
        fail(bench)
        assert bench.tags(S.RUNNING) == tags
    bench.settle()
    assert isinstance(error_of(bench, goal), ReplicaStartError)
    assert wish_of(bench) == before
    assert bench.tags() == tags
    assert list(bench.state.codes) == ["b@1"]


def test_the_running_replicas_of_a_failed_version_stop() -> None:
    bench = deployed(version="1", num_replicas=2)
    goal = bench.deploy(version="2", num_replicas=2)
    (start,) = bench.step().actions
    bench.succeed(start)
    bench.step()
    for _ in range(6):
        fail(bench)
    bench.settle()
    assert bench.goal(goal).state is GoalState.FAILED
    assert {each.version for each in bench.state.replicas_of("b")} == {"1"}
    assert len(bench.tags(S.RUNNING)) == 2


def test_a_newer_version_in_the_middle_of_a_rollout_wins() -> None:
    bench = deployed(version="1", num_replicas=2)
    second = bench.deploy(version="2", num_replicas=2)
    bench.step()
    third = bench.deploy(version="3", num_replicas=2)
    assert bench.goal(second).state is GoalState.DONE
    bench.settle()
    assert bench.goal(third).state is GoalState.DONE
    assert {each.version for each in bench.state.replicas_of("b")} == {"3"}
    assert list(bench.state.codes) == ["b@3"]


def routed(bench: Bench, route: str) -> None:
    bench.state.apply(
        endpoint_state.deploy_endpoint(bench.state, "b", route=route, methods=["GET"], python_methods=["m"])
    )


def failing_twice_over() -> Bench:
    """Return a deployment whose second version, at another route, was superseded by a third that fails."""
    bench = Bench()
    bench.deploy(version="1")
    routed(bench, "/1")
    bench.settle()
    for version in ("2", "3"):
        bench.deploy(version=version)
        routed(bench, f"/{version}")
    return bench


def fail_for_good(bench: Bench) -> None:
    for _ in range(3):
        fail(bench)
    bench.settle()
    assert {each.version for each in bench.state.replicas_of("b")} == {"1"}


def test_a_failed_new_version_restores_the_last_completed_route() -> None:
    bench = failing_twice_over()
    shadowed = replace(bench.state.endpoints["b"], shadows={"b": 0.5}, python_methods=("m", "n"))
    bench.state.apply({shadowed.key: shadowed})
    fail_for_good(bench)
    found = bench.state.endpoints["b"]
    assert (found.route, found.python_methods, found.shadows) == ("/1", ("m",), {"b": 0.5})
    assert bench.state.endpoint_at("/3") is None


def test_a_rollback_does_not_take_a_route_from_another_endpoint() -> None:
    bench = failing_twice_over()
    bench.state.apply({"endpoint/x": endpoint("x", "/1")})
    fail_for_good(bench)
    assert {tag: each.route for tag, each in bench.state.endpoints.items()} == {"b": "/3", "x": "/1"}


def test_a_rollback_does_not_restore_a_deleted_endpoint() -> None:
    bench = failing_twice_over()
    bench.state.apply({"endpoint/b": None})
    fail_for_good(bench)
    assert bench.state.endpoints == {}


def test_a_classic_endpoint_of_the_same_name_stays() -> None:
    bench = Bench()
    bench.create()
    bench.state.apply({"endpoint/b": endpoint("b", "/b")})
    for _ in range(3):
        fail(bench)
    bench.settle()
    assert set(bench.state.endpoints) == {"b"}


# ---- what routers learn


def test_only_running_replicas_are_published_to_routers() -> None:
    state = state_of(
        backend(config={"max_concurrent_queries": 5, "num_replicas": 2, "max_queued_requests": 9}),
        replica("b#1", worker="w1", incarnation=4),
        replica("b#2", S.STARTING),
        replica("b#3", S.STOPPING),
    )
    assert published_backend(state, "b") == {
        "replicas": [["b#1", "w1", 4]],
        "concurrency": 5,
        "max_queued": 9,
        "max_crash_retries": 1,
        "kind": "backend",
    }
    assert published_backend(state, "other") is None


@each_case(
    ("config", "metadata", "published"),
    [
        ({}, {}, {}),  # the whole body, as for a plain function
        ({}, {"is_blocking": False}, {"bodies": "stream"}),
        ({}, {"is_blocking": False, "is_asgi_app": True}, {"bodies": "stream"}),
        ({}, {"is_blocking": False, "accepts_batches": True}, {}),
        ({}, {"ignores_bodies": True}, {"bodies": "drop"}),
        ({"method_header": True}, {"is_blocking": False}, {}),  # the header may name a plain method
        ({"max_body_bytes": 5}, {}, {"max_body_bytes": 5}),
    ],
)
def test_body_rules_are_published_to_routers(
    config: dict[str, Any], metadata: dict[str, Any], published: dict[str, Any]
) -> None:
    record = backend(config={**config, "internal_metadata": metadata})
    found = published_backend(state_of(record), "b")
    assert {name: each for name, each in found.items() if name in ("bodies", "max_body_bytes")} == published


@each_case("reported", [{"ignores_bodies": True}, {"docs_path": "/docs"}, {}])
def test_a_started_replica_reports_facts_that_only_it_knows_of_its_callable(reported: dict[str, Any]) -> None:
    for before in ({}, {"ignores_bodies": True}, {"docs_path": "/old"}):
        config = BackendConfig(internal_metadata=before)  # type: ignore[arg-type]
        found = config.with_facts({"is_blocking": True, **reported}).internal_metadata
        assert found.ignores_bodies is reported.get("ignores_bodies", False)
        assert found.docs_path == reported.get("docs_path", "")


def test_a_replica_above_the_limit_of_each_host_waits_and_the_status_says_so() -> None:
    bench = Bench([worker(1, host="h1"), worker(2, host="h1"), worker(3, host="h2")])
    goal = bench.create(num_replicas=3, max_replicas_per_node=1)
    bench.settle()
    assert bench.goal(goal).state is GoalState.PENDING
    assert len(bench.tags(S.RUNNING)) == 2
    message = backend_status(bench.state, bench.observed, bench.state.backends["b"], bench.wall)["message"]
    assert message == "max_replicas_per_node is 1, and each of the 2 usable hosts has as many"
    bench.observed.workers["w4"] = worker(4, host="h3")
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    assert sorted(each.worker or "" for each in bench.state.replicas_of("b"))[1:] == ["w3", "w4"]


def test_a_full_limit_of_each_host_is_updated_like_a_full_cluster() -> None:
    bench = Bench([worker(1, host="h1"), worker(2, host="h2")])
    options = {"num_replicas": 2, "max_replicas_per_node": 1}
    bench.deploy(version="1", **options)
    bench.settle()
    goal, served = bench.deploy(version="2", **options), set()
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        served.add(len(bench.tags(S.RUNNING)))
    assert min(served) == 1
    assert {each.named_version for each in bench.state.replicas_of("b")} == {"2"}


def test_replicas_of_the_version_before_last_are_replaced_if_their_options_were_other_ones() -> None:
    bench = Bench()
    bench.deploy(version="1", num_replicas=2)
    bench.settle()
    old = set(bench.tags(S.RUNNING))
    bench.deploy(version="2", num_replicas=2)
    bench.deploy(version="1", num_replicas=2, isolation="process")
    bench.settle()
    assert len(bench.tags(S.RUNNING)) == 2
    assert not old & set(bench.tags(S.RUNNING))


def test_replicas_of_the_version_before_last_stay_if_it_returns_with_equal_options() -> None:
    bench = Bench()
    bench.deploy(version="1", num_replicas=2, isolation="process")
    bench.settle()
    old = set(bench.tags(S.RUNNING))
    bench.deploy(version="2", num_replicas=2)
    bench.deploy(version="1", num_replicas=2, isolation="process")
    bench.settle()
    assert set(bench.tags(S.RUNNING)) == old


@each_case("count", [1, 5])
def test_the_number_of_failed_starts_that_end_a_change_is_an_option(count: int) -> None:
    bench = Bench()
    goal, failures = bench.create(num_replicas=2, max_constructor_retry_count=count), 0
    while bench.goal(goal).state is GoalState.PENDING:
        (action, *_) = [each for each in bench.step().actions if isinstance(each, StartReplica)]
        bench.observed.failed[action.replica.tag] = BOOM
        failures += 1
        bench.step()
    assert failures == count
