"""A change may take as long as it makes progress: what counts as progress, and the messages about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from control_harness import Bench, backend, replica, state_of, worker
from controller_harness import ScriptedReplica, Stage, hang, play, staged
from tables import each_case

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend.actions import StartReplica
from daskserve.control.backend.progress import LOG_S, SETTLE_S, makes_progress
from daskserve.control.observed.observed import Activity, Notes
from daskserve.control.records.records import Change, GoalState
from daskserve.errors import ActorLostError, DeployError, NoCapacityError, RequestTimeoutError, ServeError
from daskserve.payload.packed_errors import load_error

#: The timeouts of a call without ``timeout_s``.
PATIENT: Mapping[str, Any] = MappingProxyType({"timeout_s": None, "progress_timeout_s": 60.0})
#: A replica that occupies a worker of the bench and of the stage.
WHOLE: Mapping[str, Any] = MappingProxyType({"num_cpus": 4})


def running_version(stage: Stage, tag: str = "b") -> list[str]:
    return sorted(each.message.code.decode() for each in stage.running_of(tag))


def deploy(stage: Stage, version: str, **fields: Any) -> asyncio.Task[None]:
    fields = {"num_replicas": 5, **PATIENT, **fields}
    return asyncio.create_task(stage.deploy(version=version, code=version.encode(), **fields))


def error_of(bench: Bench, goal: str) -> ServeError | None:
    packed = bench.goal(goal).error
    return None if packed is None else load_error(packed)


# ---- what takes long, and is no reason to give up


@staged()
async def test_an_update_takes_as_long_as_its_replicas_need_one_after_another(stage: Stage) -> None:
    await deploy(stage, "1")
    stage.start_s, began = 14.0, stage.clock.now()
    await deploy(stage, "2")
    assert running_version(stage) == 5 * ["2"]
    assert stage.clock.now() - began > 60


@each_case(("workers", "max_surge"), [(3, 1), (2, 1), (3, 2)])
def test_old_replicas_have_their_grace_period_also_where_new_ones_wait_for_their_room(
    workers: int, max_surge: int
) -> None:
    """With a surge of 2, one new replica has room at once, and starts while the other one waits."""

    async def scenario(stage: Stage) -> None:
        options: dict[str, Any] = {
            "num_replicas": 2,
            "max_surge": max_surge,
            "actor_options": dict(WHOLE),
            "graceful_shutdown_timeout_s": 400.0,
            "progress_timeout_s": 20.0,
        }
        await deploy(stage, "1", **options)
        stage.start_s, stage.drain_s = 75.0, 300.0
        await deploy(stage, "2", **options)
        assert running_version(stage) == ["2", "2"]

    play(scenario, workers=workers)


def test_a_replica_that_drains_at_the_deadline_makes_room_for_the_one_that_waits() -> None:
    bench = Bench([worker(1), worker(2)])
    options = {"num_replicas": 2, "actor_options": dict(WHOLE)}
    bench.deploy(version="1", **options)
    bench.settle()
    goal = bench.deploy(version="2", **options, **PATIENT)
    bench.step()
    (stop,) = bench.step().actions
    for is_draining in (True, False):
        bench.now += 60
        bench.observed.busy = {stop.replica.tag: Activity("draining", 60.0)} if is_draining else {}
        bench.step()
        assert (bench.goal(goal).state is GoalState.PENDING) is is_draining


@staged()
async def test_reconfigure_may_take_as_long_as_a_constructor(stage: Stage) -> None:
    async def take_long(replica: ScriptedReplica) -> None:
        await stage.clock.sleep(seconds)

    await deploy(stage, "1", num_replicas=2, start_timeout_s=100.0, user_config=b"one")
    stage.reconfigure, seconds = take_long, 90.0
    update = {"tag": "b", "config": {}, "sets_user_config": True, **PATIENT}
    await stage.change("update_backend_config", **update, user_config=b"two")
    seconds = 130.0
    with pytest.raises(RequestTimeoutError, match=r"reconfigure\(\) did not return within 100 s"):
        await stage.change("update_backend_config", **update, user_config=b"three")


# ---- what is given up


@staged()
async def test_a_constructor_that_takes_longer_than_it_may_ends_an_update_that_says_how_far_it_came(
    stage: Stage,
) -> None:
    await deploy(stage, "1")

    async def start(replica: ScriptedReplica) -> None:
        if running_version(stage).count("2") == 3:
            await hang(replica)

    stage.start_s, stage.start, began = 14.0, start, stage.clock.now()
    with pytest.raises(
        RequestTimeoutError,
        match=r"did not start within 90 s: it was still starting. .* 3 of 5 replicas were updated\.$",
    ):
        await deploy(stage, "2", start_timeout_s=90.0)
    assert 3 * 14 + 90 <= stage.clock.now() - began < 3 * 14 + 92
    stage.start = None
    await stage.until(lambda: running_version(stage) == 5 * ["1"])


@staged()
async def test_a_replica_that_cannot_be_reached_makes_no_progress(stage: Stage) -> None:
    async def unreachable(replica: ScriptedReplica) -> None:
        if len(stage.started) == 1:
            await stage.clock.sleep(5)
        raise ActorLostError("the connection broke")

    stage.start, stage.start_s = unreachable, 0.0
    with pytest.raises(RequestTimeoutError, match="made no progress for 60 s"):
        await deploy(stage, "1", num_replicas=1)
    assert 60 <= stage.clock.now() <= 66


@each_case("start_s", [0.01, 75.0])
@staged()
async def test_replicas_without_room_are_given_up_although_others_still_start(
    stage: Stage, start_s: float
) -> None:
    stage.start_s, began = start_s, stage.clock.now()
    with pytest.raises(NoCapacityError, match="to 5 replicas within 60 s: a replica needs CPU 4"):
        await deploy(stage, "1", actor_options=dict(WHOLE))
    assert 60 <= stage.clock.now() - began < 62


@staged(workers=1)
async def test_the_wait_for_room_begins_again_when_a_replica_finds_some(stage: Stage) -> None:
    asyncio.get_running_loop().call_later(50, stage.cluster.add_worker)
    with pytest.raises(NoCapacityError, match="to 3 replicas within 60 s"):
        await deploy(stage, "1", num_replicas=3, actor_options=dict(WHOLE))
    assert 110 <= stage.clock.now() < 112


def test_a_change_fails_once_nothing_has_progressed() -> None:
    bench = Bench([worker(1)])
    goal = bench.create(num_replicas=2, **PATIENT)
    first, _ = bench.step().actions
    for seconds in (59, 59):
        bench.now += seconds
        bench.observed.busy[first.replica.tag] = Activity("running its constructor", seconds)
        bench.step()
    bench.now += 60
    bench.observed.busy.clear()
    bench.succeed(first)  # in the moment of the deadline
    bench.step()
    bench.now += 59.9
    bench.step()
    assert bench.goal(goal).state is GoalState.PENDING  # the first one has started
    bench.now += 0.1
    bench.step()
    error = error_of(bench, goal)
    assert isinstance(error, RequestTimeoutError)
    assert str(error) == (
        "The change of backend 'b' made no progress for 60 s (daskserve.timeouts.change-s). 1 of 2 replicas "
        "were started."
    )


def test_autoscaling_does_not_count_as_progress_of_a_change() -> None:
    scaled = backend(config={"autoscaling_config": {"max_replicas": 3}}, scaled_to=2)
    more = replica("b#2", S.STARTING)
    change: Change = {more.key: more}
    assert makes_progress(state_of(scaled), scaled, change)
    assert not makes_progress(state_of(scaled, replica("b#1")), scaled, change)


@each_case("is_lost", [False, True])
def test_new_replicas_that_start_and_die_again_and_again_fail_an_update(is_lost: bool) -> None:
    bench = Bench([worker(1), worker(2)])
    bench.deploy(version="1", num_replicas=2)
    bench.settle()
    goal = bench.deploy(version="2", num_replicas=2, max_constructor_retry_count=3, **PATIENT)
    for count in range(3):
        assert (bench.goal(goal).state, bench.goal(goal).failures) == (
            GoalState.PENDING,
            {"b": count} if count else {},
        )
        for action in bench.step().actions:
            if not isinstance(action, StartReplica):
                bench.succeed(action)
        bench.step()
        tag = next(each.replica.tag for each in bench.step().actions if isinstance(each, StartReplica))
        bench.observed.ready[tag] = {}
        bench.step()
        if is_lost:
            bench.observed.failed[tag] = ServeError("its process ended")
        else:
            bench.observed.unhealthy[tag] = "its check failed"
        bench.step()
    error = error_of(bench, goal)
    assert isinstance(error, DeployError)
    assert "was lost before the change was complete: " in str(error)
    assert str(error).endswith("0 of 2 replicas were updated.")


# ---- a new controller


@staged()
async def test_the_time_of_a_constructor_continues_under_a_new_controller(stage: Stage) -> None:
    stage.start = hang
    creating = deploy(stage, "1", num_replicas=1, start_timeout_s=50.0)
    await stage.clock.sleep(40)
    await stage.crash_controller()
    with pytest.raises(RequestTimeoutError, match="did not start within 50 s"):
        await creating
    assert 50 <= stage.clock.now() < 55
    assert len(stage.started) == 1


@each_case(
    ("limits", "age_s", "left_s"),
    [
        ({"timeout_s": 60.0}, 45.0, 15.0),
        ({"timeout_s": 60.0}, 1000.0, SETTLE_S),
        ({"timeout_s": 5.0}, 1000.0, 5.0),
        (PATIENT, 45.0, 15.0),
        (PATIENT, -45.0, 60.0),
    ],
)
@each_case("has_room", [True, False])
def test_a_new_controller_continues_where_the_one_before_was(
    limits: Mapping[str, Any], age_s: float, left_s: float, has_room: bool
) -> None:
    bench = Bench([worker(1)] if has_room else [])
    bench.wall = 1e9
    bench.create(**limits)
    bench.step()
    observed = bench.observed
    observed.deadlines.clear()
    observed.learn("b", Notes())
    observed.inherited = frozenset(bench.state.goals)
    bench.now, bench.wall = 5000.0, bench.wall + age_s
    assert bench.step().wake_at == bench.now + min(left_s, LOG_S)
    (deadline,) = observed.deadlines.values()
    full_from = observed.notes["b"].full_from or bench.now
    assert min(deadline, full_from + 60) == bench.now + left_s


# ---- what is said


def test_the_status_and_the_log_say_what_a_slow_start_does(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_s = 100.0
        creating = deploy(stage, "1", num_replicas=2)
        await stage.clock.sleep(29)
        assert (await stage.call("status"))["backends"]["b"]["message"] == ""
        await stage.clock.sleep(40)
        status = await stage.call("status")
        tag = stage.started[0]
        assert status["backends"]["b"]["message"] == f"{tag} has been starting for 60 s"
        assert [each["message"] for each in status["actors"] if each["name"] == tag] == ["starting for 60 s"]
        await creating
        assert (await stage.call("status"))["backends"]["b"]["message"] == ""
        expected = f"A change of deployment 'b' takes long: 0 of 2 replicas run; {tag} has been starting for"
        said = [each.message for each in caplog.records if "takes long" in each.message]
        assert [each.startswith(expected) for each in said] == [True, True, True]

    with caplog.at_level(logging.INFO, "daskserve.controller"):
        play(scenario)


@staged()
async def test_an_application_says_how_many_of_its_deployments_were_up(stage: Stage) -> None:
    def fail_in(tag: str) -> Callable[[ScriptedReplica], Any]:
        async def start(replica: ScriptedReplica) -> None:
            if replica.message.backend_tag == tag:
                await hang(replica)

        return start

    stage.start = fail_in("front")
    front = {"start_timeout_s": 70.0, "num_replicas": 2}
    with pytest.raises(
        RequestTimeoutError, match=r"0 of 2 replicas were started, and 1 of 2 deployments were up\.$"
    ):
        await stage.run(**PATIENT, front=front)
