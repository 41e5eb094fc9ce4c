"""Placement groups: a replica reserves all of its bundles, keeps them, and ends without one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from control_harness import Bench, backend, replica, state_of, worker
from controller_harness import Stage, staged
from full_cluster import message
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import ReplicaState as S
from daskserve.common.types import WorkerInfo
from daskserve.control.backend import gangs
from daskserve.control.backend.actions import StartReplica, StopReplica
from daskserve.control.backend.ranks import ranks_to_change
from daskserve.control.observed.observed import Observed
from daskserve.control.placement.placement import TentativeUsage, demand_of
from daskserve.control.records.bundles import places_of
from daskserve.control.records.records import AppRecord, GoalState, ReplicaRecord
from daskserve.control.records.storing.checkpoint import restore
from daskserve.control.records.storing.encoding import encode
from daskserve.control.views.applications import application_status
from daskserve.errors import NoCapacityError
from daskserve.payload.packed_errors import load_error

PAIR = [{"CPU": 1}, {"CPU": 2}]


def deploy(bench: Bench, version: str = "1", bundles: Any = PAIR, replicas: int = 1, **more: Any) -> str:
    strategy = more.pop("strategy", None)
    options = {"placement_group_bundles": bundles} if bundles else {}
    if strategy:
        options["placement_group_strategy"] = strategy
    counted = {} if "autoscaling_config" in more else {"num_replicas": replicas}
    return bench.deploy(version=version, user_version=version, **options, **counted, **more)


def apart(count: int, threads: int = 2, **fields: Any) -> list[WorkerInfo]:
    return [worker(n, threads=threads, host=f"h{n}", **fields) for n in range(1, count + 1)]


def places(bench: Bench, *states: S) -> list[list[str]]:
    """Return the workers of each replica's bundles."""
    found = bench.state.replicas_of("b")
    return [[at for at, _ in places_of(each)] for each in found if not states or each.state in states]


def check_room(bench: Bench) -> None:
    """Check that no worker is over-committed, and that replicas have all of their bundles or none."""
    used: dict[str, float] = {}
    for each in bench.state.replicas_of("b"):
        assert (each.worker is None) == (not places_of(each))
        assert not each.bundles or each.demand == each.bundles[0]
        for at, amounts in places_of(each):
            used[at] = used.get(at, 0) + amounts["CPU"]
    for at, amount in used.items():
        assert bench.state.used(at) == {"CPU": pytest.approx(amount)}
        if at in bench.observed.workers:
            assert amount <= bench.observed.workers[at].threads + 1e-9


def lose(bench: Bench, at: str) -> None:
    bench.observed.workers.pop(at, None)
    bench.observed.lost_workers.add(at)


def test_a_replica_reserves_all_of_its_bundles_and_runs_in_the_first() -> None:
    bench = Bench(apart(2))
    goal = deploy(bench, strategy="STRICT_SPREAD")
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    (found,) = bench.state.replicas_of("b")
    assert (found.worker, found.demand) == (found.bundle_workers[0], {"CPU": 1.0})
    assert {at: bench.state.used(at) for at in found.bundle_workers} == {
        found.bundle_workers[0]: {"CPU": 1.0},
        found.bundle_workers[1]: {"CPU": 2.0},
    }
    assert bench.state.workers_in_use() == {"w1", "w2"}
    bench.delete()
    bench.settle()
    assert [bench.state.used(at) for at in ("w1", "w2")] == [{}, {}]
    assert bench.state.workers_in_use() == set()


def test_without_room_for_all_nothing_starts_and_the_status_says_why() -> None:
    bench = Bench(apart(2))
    deploy(bench, bundles=[{"CPU": 1}, {"CPU": 2}, {"CPU": 2}])
    assert bench.step().actions == []
    assert places(bench) == [[]]
    assert message(bench) == (
        "the 3 bundles of a placement group are reserved together, and only 2 have room: a bundle needs "
        "CPU 2 (most free on one worker: 1); 2 workers were considered"
    )
    bench.observed.workers["w3"] = worker(3, threads=2, host="h3")
    (start,) = bench.step().actions
    assert isinstance(start, StartReplica)
    assert message(bench) == ""


def test_a_deploy_without_room_fails_in_time_and_says_what_to_reduce() -> None:
    bench = Bench(apart(2))
    goal = deploy(bench, strategy="STRICT_PACK", timeout_s=10.0)
    bench.step()
    bench.now += 11
    bench.step()
    assert bench.goal(goal).state is GoalState.FAILED
    error = load_error(bench.goal(goal).error or b"")
    assert isinstance(error, NoCapacityError)
    assert "together they need CPU 3 (most free on one host: 2). Add workers, reduce the" in str(error)
    assert "resources in placement_group_bundles" in str(error)


def test_replicas_do_not_share_room_and_those_without_any_wait() -> None:
    bench = Bench(apart(3, threads=3))
    deploy(bench, replicas=4, strategy="STRICT_PACK")
    bench.step()
    check_room(bench)
    assert sorted(places(bench)) == [[], ["w1", "w1"], ["w2", "w2"], ["w3", "w3"]]


def test_other_backends_leave_the_room_of_bundles_alone() -> None:
    bench = Bench(apart(2))
    deploy(bench, strategy="STRICT_SPREAD")
    bench.settle()
    bench.create("other", num_replicas=1, actor_options={"num_cpus": 2})
    assert bench.step("other").actions == []
    assert (bench.observed.notes["other"].waiting or "").startswith(
        "a replica needs CPU 2 (most free on one worker: 1)"
    )


@each_case("how", ["lost", "silent"])
@each_case("state", [S.STARTING, S.RUNNING])
def test_a_replica_that_loses_a_bundle_is_replaced(how: str, state: S) -> None:
    bench = Bench(apart(2))
    deploy(bench, strategy="STRICT_SPREAD")
    bench.step()
    if state is S.RUNNING:
        bench.settle()
    (old,) = bench.state.replicas_of("b")
    assert old.state is state
    own, other = old.bundle_workers
    if how == "lost":
        lose(bench, other)
    else:
        bench.observed.unresponsive.add(other)
    bench.observed.workers["w3"] = worker(3, threads=2, host="h3")
    taken = bench.step()
    (stop,) = [each for each in taken.actions if isinstance(each, StopReplica)]
    assert (stop.replica.tag, stop.grace_s) == (old.tag, 0.0)
    verb = "left the cluster" if how == "lost" else "does not answer"
    (dead,) = bench.observed.notes["b"].dead
    assert dead.reason == f"worker {other}, which has bundle 1 of its placement group, {verb}"
    assert dead.version == old.version != ""
    bench.settle()
    (new,) = bench.state.replicas_of("b")
    assert new.state is S.RUNNING
    assert set(new.bundle_workers) == {own, "w3"}
    check_room(bench)


def test_resources_of_a_lost_replica_are_free_once_it_has_ended() -> None:
    bench = Bench(apart(2))
    deploy(bench, strategy="STRICT_SPREAD")
    bench.settle()
    (old,) = bench.state.replicas_of("b")
    lose(bench, str(old.worker))
    bench.step()
    # The record and its reservation on the other worker are removed at once.
    assert bench.state.used(old.bundle_workers[1]) == {}


def test_a_bundle_on_a_retiring_worker_moves_the_replica_before_it_stops() -> None:
    bench = Bench(apart(2))
    deploy(bench, strategy="STRICT_SPREAD")
    bench.settle()
    (old,) = bench.state.replicas_of("b")
    other = old.bundle_workers[1]
    leaving = worker(int(other[1:]), threads=2, host=f"h{other[1:]}", is_retiring=True, is_available=False)
    bench.observed.workers[other] = leaving
    for number in (3, 4):
        bench.observed.workers[f"w{number}"] = worker(number, threads=2, host=f"h{number}")
    for _ in range(10):
        for action in bench.step().actions:
            bench.succeed(action)
        assert bench.tags(S.RUNNING)
        check_room(bench)
    assert old.tag not in bench.tags()
    assert other not in bench.state.workers_in_use()


def test_reservations_outlive_the_controller() -> None:
    bench = Bench(apart(2))
    deploy(bench, strategy="STRICT_SPREAD")
    bench.settle()
    stored = {key: encode(each) for key, each in bench.state.records().items()}
    state, corrupt = restore(stored)
    assert not corrupt
    assert state.replicas_of("b") == bench.state.replicas_of("b")
    assert [state.used(at) for at in ("w1", "w2")] == [bench.state.used(at) for at in ("w1", "w2")]
    # A new controller knows that the other worker is in use before it has seen that worker.
    assert state.workers_in_use() == {"w1", "w2"}


def test_a_replica_that_an_earlier_release_recorded_has_its_own_place_only() -> None:
    old = replica("b#1")
    assert places_of(old) == (("w1", {"CPU": 0.1}),)
    assert state_of(old).used("w1") == {"CPU": 0.1}


def test_a_trial_counts_the_bundles_of_others() -> None:
    bench = Bench(apart(2))
    deploy(bench, strategy="STRICT_SPREAD")
    bench.settle()
    trial = TentativeUsage(bench.state, {})
    before = [dict(trial.used(at)) for at in ("w1", "w2")]
    with trial.without(bench.state.replicas_of("b")):
        assert [trial.used(at)["CPU"] for at in ("w1", "w2")] == [0, 0]
        assert trial.bundles_on()["w2"] == trial.workers_of("b")["w2"] == 0
    assert [trial.used(at) for at in ("w1", "w2")] == before


@each_case(
    ("before", "after"),
    [
        (PAIR, PAIR),
        (PAIR, None),
        (None, PAIR),
        (PAIR, [{"CPU": 2}, {"CPU": 1}, {"CPU": 1}]),  # larger: three have room, as the first four
    ],
)
def test_an_update_of_a_full_cluster_makes_room_for_whole_groups(before: Any, after: Any) -> None:
    bench = Bench(apart(4, threads=3))
    options = {"actor_options": {"num_cpus": 3}}
    deploy(bench, "1", before, autoscaling_config=scaled_to(4), **({} if before else options))
    bench.settle()
    assert len(bench.tags(S.RUNNING)) == 4
    goal = deploy(bench, "2", after, autoscaling_config=scaled_to(3), **({} if after else options))
    for _ in range(60):
        for action in bench.step().actions:
            bench.succeed(action)
        check_room(bench)
        assert bench.tags(S.RUNNING)
        if bench.goal(goal).state is not GoalState.PENDING:
            break
    assert bench.goal(goal).state is GoalState.DONE
    assert {each.named_version for each in bench.state.replicas_of("b")} == {"2"}


def scaled_to(replicas: int) -> dict[str, int]:
    return {"min_replicas": 1, "max_replicas": 4, "initial_replicas": replicas}


def test_as_few_old_groups_as_possible_make_room() -> None:
    bench = Bench(apart(4))
    deploy(bench, "1", [{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK", autoscaling_config=scaled_to(4))
    bench.settle()
    halves = [{"CPU": 2}, {"CPU": 2}]
    deploy(bench, "2", halves, strategy="STRICT_SPREAD", autoscaling_config=scaled_to(2))
    stops = [each for each in bench.step().actions if isinstance(each, StopReplica)]
    assert len(stops) == 2
    assert message(bench).startswith(
        "no room for a new replica beside the old ones: draining 2 old replicas at a time"
    )


def test_an_old_group_that_does_not_help_is_not_drained_with_those_that_do() -> None:
    bench = Bench(apart(3, threads=4))
    deploy(bench, "2", [{"CPU": 2}, {"CPU": 2}], strategy="STRICT_PACK")
    pair = ({"CPU": 1.0}, {"CPU": 1.0})
    old = [
        replica(f"b#{name}", version="1", worker=at, demand=pair[0], bundles=pair, bundle_workers=(at, at))
        for name, at in (("idle", "w1"), ("busy", "w2"), ("busier", "w2"), ("busiest", "w3"))
    ]
    others = [replica(f"other#{at}", worker=at, demand={"CPU": 2.0}) for at in ("w1", "w3")]
    bench.state.apply({each.key: each for each in (*old, *others)})
    record, ongoing = bench.state.backends["b"], {"b#busy": 1.0, "b#busier": 2.0, "b#busiest": 3.0}
    workers = bench.observed.cleared_workers()
    found = gangs.to_drain(record, old, TentativeUsage(bench.state, {}), workers, demand_of(record), ongoing)
    assert [each.tag for each in found] == ["b#busy", "b#busier"]


def test_an_old_group_makes_room_for_a_replica_on_the_worker_of_its_other_bundle() -> None:
    bench = Bench(apart(2))
    deploy(bench, "1", [{"CPU": 0.5}, {"CPU": 2}], strategy="STRICT_SPREAD")
    bench.settle()
    (old,) = bench.state.replicas_of("b")
    other = replica("other#1", worker=old.worker, demand={"CPU": 1.0})
    bench.state.apply({other.key: other})
    goal = deploy(bench, "2", None, actor_options={"num_cpus": 2})
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE


def test_other_bundles_replace_the_replicas_and_the_same_ones_do_not() -> None:
    bench = Bench(apart(3, threads=8))
    deploy(bench)
    bench.settle()
    tags = bench.tags()
    deploy(bench, strategy="SPREAD")
    bench.settle()
    assert bench.tags() != tags
    tags = bench.tags()
    bench.update(num_replicas=2)
    bench.settle()
    assert bench.tags()[:1] == tags
    assert len(bench.tags(S.RUNNING)) == 2


def test_a_gang_reserves_the_bundles_of_all_its_replicas() -> None:
    bench = Bench(apart(3, threads=3))
    gang = {"gang_size": 2, "gang_placement_strategy": "SPREAD"}
    deploy(bench, replicas=4, gang_scheduling_config=gang)
    bench.step()
    check_room(bench)
    placed = [each for each in bench.state.replicas_of("b") if each.worker]
    assert [len(each.bundle_workers) for each in placed] == [2, 2]
    assert placed[0].gang == placed[1].gang
    assert message(bench).startswith("the 4 bundles of a gang are reserved together, and only")
    bench.observed.workers["w4"] = worker(4, threads=3)
    bench.settle()
    assert len(bench.tags(S.RUNNING)) == 4
    # The loss of one bundle ends the gang.
    victim = bench.state.replicas_of("b")[0]
    lose(bench, victim.bundle_workers[1])
    bench.step()
    assert set(victim.gang).isdisjoint(bench.tags(S.STARTING, S.RUNNING))


EVENTS = st.sampled_from(["all", "one", "nothing", "lose", "return", "retire", "deploy", "scale"])


@given(
    strategies=st.lists(st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD", ""]), min_size=1),
    events=st.lists(st.tuples(EVENTS, st.integers(0, 4)), max_size=30),
)
def test_no_sequence_of_changes_overcommits_a_worker(
    strategies: list[str], events: list[tuple[str, int]]
) -> None:
    bench = Bench(apart(3, threads=4))
    sizes = [PAIR, [{"CPU": 2}, {"CPU": 1}], [{"CPU": 1}] * 3]

    versions = itertools.count()

    def change(number: int) -> None:
        strategy = strategies[number % len(strategies)]
        bundles = sizes[number % len(sizes)] if strategy else None
        deploy(bench, str(next(versions)), bundles, 1 + number % 3, strategy=strategy, timeout_s=None)

    change(0)
    for event, number in events:
        actions = bench.step().actions
        check_room(bench)
        at = f"w{1 + number % 4}"
        if event in ("all", "one"):
            for action in actions if event == "all" else actions[:1]:
                bench.succeed(action)
        elif event == "lose" and at in bench.observed.workers:
            lose(bench, at)
        elif event == "return":
            bench.observed.workers[at] = worker(int(at[1:]), threads=4, host=f"h{at[1:]}")
        elif event == "retire" and at in bench.observed.workers:
            bench.observed.workers[at] = worker(int(at[1:]), is_retiring=True, is_available=False)
        elif event == "deploy":
            change(number)
        elif event == "scale" and bench.state.backends["b"].num_replicas != 1 + number % 3:
            bench.update(num_replicas=1 + number % 3)
        forget_lost(bench)
    bench.observed.workers = {each.address: each for each in apart(9, threads=8)[4:]}
    bench.observed.lost_workers |= bench.state.workers_in_use() - set(bench.observed.workers)
    bench.settle()
    bench.now += 100
    bench.settle()
    check_room(bench)
    assert len(bench.tags(S.RUNNING)) == bench.state.backends["b"].num_replicas == len(bench.tags())


def forget_lost(bench: Bench) -> None:
    """Forget lost workers, as the reconciler does after each step."""
    bench.observed.lost_workers &= bench.state.workers_in_use()


@staged(workers=3)
async def test_the_scheduler_hears_of_all_bundles_and_of_the_workers_that_are_missing(stage: Stage) -> None:
    await stage.create("b", placement_group_bundles=[{"CPU": 3}, {"CPU": 3}])
    (running,) = stage.running_of("b")
    in_use = {at for at, _ in running.message.bundles}
    assert len(in_use) == 2
    assert running.message.bundles[0] == [running.worker, {"CPU": 3.0}]
    await stage.until(lambda: stage.cluster.reported.in_use == in_use)
    assert stage.cluster.reported.occupied == {running.worker: {"CPU": 3.0}}, "the others are for tasks"
    await stage.crash_controller()
    await stage.until(lambda: stage.cluster.reported.in_use == in_use)
    assert stage.running_of("b") == [running]
    waiting = {"num_replicas": 2, "gang_scheduling_config": {"gang_size": 2}}
    spec = stage.spec("c", placement_group_bundles=[{"CPU": 4}, {"CPU": 4}], **waiting)
    await stage.call("create_backend", **spec)
    await stage.until(lambda: stage.cluster.reported.waiting_workers == 4)
    stage.cluster.remove_worker(next(iter(in_use - {running.worker})))
    stage.cluster.add_worker()
    await stage.until(lambda: [each for each in stage.running_of("b") if each is not running])
    assert stage.stopped == [(running.tag, 0.0)]


def test_a_replica_with_a_bundle_on_a_retiring_worker_is_on_its_way() -> None:
    observed = Observed(workers={f"w{n}": worker(n, is_retiring=n == 2) for n in (1, 2)}, ready={"b#1": {}})
    grouped = {"bundles": ({"CPU": 0.1}, {"CPU": 1.0}), "bundle_workers": ("w1", "w2")}
    member, app = backend(application="default", num_replicas=2), AppRecord("default", "/", {"b": "b"})
    first, second = replica("b#1", rank=(2, 0, 0), **grouped), replica("b#2", rank=(1, 0, 1))
    state = state_of(member, app, first, second)
    found = application_status(state, observed, app, 0.0)
    assert found["deployments"]["b"]["replica_states"]["PENDING_MIGRATION"] == 1
    # While this replica exists, no rank is too high.
    assert ranks_to_change(member, [first, second], observed) == []


def test_events_of_a_replica_without_a_group_ignore_the_workers_of_others() -> None:
    observed = Observed(lost_workers={"w2"})
    assert observed.event_of(replica("b#1", worker="w1")) is None
    grouped: ReplicaRecord = replica(
        "b#1", worker="w1", bundles=({"CPU": 0.1}, {"CPU": 1.0}), bundle_workers=("w1", "w2")
    )
    assert observed.event_of(grouped) == "unwanted"
    stopping = replica(
        "b#1", S.STOPPING, worker="w1", bundles=({"CPU": 0.1}, {"CPU": 1.0}), bundle_workers=("w1", "w2")
    )
    assert observed.event_of(stopping) is None


@staged(workers=1)
async def test_a_replica_waits_for_what_tasks_hold_and_then_keeps_it_from_them(stage: Stage) -> None:
    (only,) = [each.address for each in stage.cluster.workers()]
    stage.cluster.change_worker(only, resources={"GPU": 1.0}, taken_by_tasks={"GPU": 1.0})
    await stage.clock.sleep(31)  # by then, the controller has read the list of workers again
    wanted = {"num_gpus": 1, "num_cpus": 2}
    with pytest.raises(NoCapacityError, match=r"GPU 1 \(most free on one worker: 0\).*tasks hold GPU 1"):
        await stage.create("b", actor_options=wanted, timeout_s=5.0)
    creating = asyncio.ensure_future(stage.create("b", actor_options=wanted))
    await stage.until(lambda: stage.cluster.reported.claimed == {only: {"GPU": 1.0}})
    assert not stage.cluster.reported.occupied
    stage.cluster.change_worker(only, taken_by_tasks={})
    await creating
    await stage.until(lambda: stage.cluster.reported.occupied == {only: {"CPU": 2.0, "GPU": 1.0}})
    assert not stage.cluster.reported.claimed
    await stage.delete("b")
    await stage.until(lambda: not stage.cluster.reported.occupied)
