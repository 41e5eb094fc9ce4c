"""Gangs of replicas: they start together or not at all, are replaced together, and end together."""

from __future__ import annotations

import random
from typing import Any

from control_harness import Bench, backend, replica, state_of, worker
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend import gangs
from daskserve.control.backend.actions import StartReplica, StopReplica
from daskserve.control.placement.eviction_order import EvictionCriteria
from daskserve.control.placement.placement import TentativeUsage, place
from daskserve.control.records.records import GoalState, ReplicaRecord
from daskserve.options.actor import ActorOptions


def deploy(
    bench: Bench, replicas: int = 4, size: int = 2, version: str = "1", cpus: float = 1, **more: Any
) -> str:
    strategy = more.pop("strategy", "PACK")
    gang = {"gang_size": size, "gang_placement_strategy": strategy} if size > 1 else None
    return bench.deploy(
        num_replicas=replicas,
        gang_scheduling_config=gang,
        version=version,
        user_version=version,
        actor_options={"num_cpus": cpus},
        **more,
    )


def members(bench: Bench, *states: S) -> dict[tuple[str, ...], list[ReplicaRecord]]:
    found: dict[tuple[str, ...], list[ReplicaRecord]] = {}
    for each in bench.state.replicas_of("b"):
        if not states or each.state in states:
            found.setdefault(each.gang, []).append(each)
    return found


def check_whole(bench: Bench) -> None:
    """Check that the replicas of each gang are all placed, all unplaced or all stopping."""
    live = members(bench, S.SHOULD_START, S.STARTING, S.RUNNING)
    for gang, found in live.items():
        assert not gang or [each.tag for each in found] == list(gang)
        assert not gang or len({each.worker is None for each in found}) == 1


def test_gangs_start_together_and_know_each_other() -> None:
    bench = Bench([worker(1), worker(2)])
    goal = deploy(bench)
    bench.settle()
    assert bench.goal(goal).state is GoalState.DONE
    running = members(bench, S.RUNNING)
    assert [len(each) for each in running.values()] == [2, 2]
    check_whole(bench)


def test_a_gang_starts_only_if_all_of_it_has_room_and_says_what_is_missing() -> None:
    bench = Bench([worker(1, threads=2), worker(2, threads=1)])
    deploy(bench, 4, 4)
    assert bench.step().actions == []
    assert {each.state for each in bench.state.replicas_of("b")} == {S.SHOULD_START}
    waiting = bench.observed.notes["b"].waiting
    assert waiting.startswith(
        "the 4 replicas of a gang start together, and only 3 have room: a replica needs"
    )
    bench.observed.workers["w3"] = worker(3, threads=1)
    assert [type(each) for each in bench.step().actions] == [StartReplica] * 4
    assert bench.observed.notes_of("b").waiting is None


def test_a_gang_that_has_room_starts_while_another_one_waits() -> None:
    bench = Bench([worker(1, threads=3)])
    deploy(bench, 4, 2)
    bench.step()
    assert sorted(each.state for each in bench.state.replicas_of("b")) == sorted(
        [S.STARTING, S.STARTING, S.SHOULD_START, S.SHOULD_START]
    )
    check_whole(bench)


@each_case(
    ("strategy", "threads", "expected"),
    [
        ("PACK", (2, 4, 2), [["w2"] * 4]),
        ("SPREAD", (2, 4, 2), [["w1", "w1", "w2", "w3"], ["w1", "w2", "w2", "w3"], ["w1", "w2", "w3", "w3"]]),
        ("PACK", (3, 3, 2), [["w1"] * 3 + ["w2"], ["w1"] + ["w2"] * 3]),
    ],
)
def test_a_gang_is_packed_or_spread(
    strategy: str, threads: tuple[int, ...], expected: list[list[str]]
) -> None:
    bench = Bench([worker(n, threads=each) for n, each in enumerate(threads, 1)])
    deploy(bench, 4, 4, strategy=strategy)
    bench.settle()
    assert sorted(str(each.worker) for each in bench.state.replicas_of("b")) in expected


def test_a_packed_gang_prefers_one_host() -> None:
    hosts = ["h1", "h2", "h2"]
    bench = Bench([worker(n, threads=2, host=host) for n, host in enumerate(hosts, 1)])
    deploy(bench, 4, 4)
    bench.settle()
    assert {each.worker for each in bench.state.replicas_of("b")} == {"w2", "w3"}


@each_case("how", ["failed", "unhealthy", "lost"])
def test_the_loss_of_one_replica_restarts_its_gang_and_no_other(how: str) -> None:
    bench = Bench([worker(n, threads=4) for n in (1, 2)])
    deploy(bench, 4, 2, strategy="SPREAD")
    bench.settle()
    first, second = members(bench)
    victim = bench.state.replicas[first[0]]
    others = {
        each
        for gang in (first, second)
        for each in gang
        if bench.state.replicas[each].worker == victim.worker
    }
    if how == "failed":
        bench.observed.failed[victim.tag] = RuntimeError("out of memory")
    elif how == "unhealthy":
        bench.observed.unhealthy[victim.tag] = "check_health failed"
    else:
        del bench.observed.workers[str(victim.worker)]
        bench.observed.lost_workers.add(str(victim.worker))
    taken = bench.step()
    check_whole(bench)
    stops = {each.replica.tag for each in taken.actions if isinstance(each, StopReplica)}
    assert all(each.grace_s == 0 for each in taken.actions if isinstance(each, StopReplica))
    assert first[1] in stops
    if how != "lost":
        assert second in members(bench, S.RUNNING)
        assert stops <= set(first)
    else:
        assert others & set(first)
        assert others & set(second)
    bench.observed.lost_workers.clear()
    bench.settle()
    after = members(bench, S.RUNNING)
    assert first not in after
    assert [len(each) for each in after.values()] == [2, 2]
    reasons = [each.reason for each in bench.observed.notes["b"].dead]
    assert "another replica of its gang was lost" in reasons


def test_an_update_replaces_gangs_as_a_whole_and_new_before_old() -> None:
    bench = Bench([worker(n) for n in (1, 2)])
    deploy(bench, 4, 2)
    bench.settle()
    goal = deploy(bench, 4, 2, "2")
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        check_whole(bench)
        assert len(bench.tags(S.RUNNING)) >= 4
        assert (
            len([each for each in bench.state.replicas_of("b") if each.state in (S.STARTING, S.RUNNING)]) <= 6
        )
    assert {each.named_version for each in bench.state.replicas_of("b")} == {"2"}


def test_an_update_of_a_full_cluster_drains_one_gang_at_a_time() -> None:
    bench = Bench([worker(n, threads=2) for n in (1, 2)])
    deploy(bench, 4, 2)
    bench.settle()
    goal = deploy(bench, 4, 2, "2")
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        check_whole(bench)
        assert len(bench.tags(S.RUNNING)) >= 2
    assert {each.named_version for each in bench.state.replicas_of("b")} == {"2"}


@each_case(("before", "after"), [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_gangs_of_another_size_keep_the_service(before: int, after: int) -> None:
    bench = Bench([worker(n, threads=16) for n in (1, 2)])
    deploy(bench, 8, before)
    bench.settle()
    goal = deploy(bench, 8, after, "2")
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        check_whole(bench)
        assert len(bench.tags(S.RUNNING)) >= 8
    assert {len(each.gang) for each in bench.state.replicas_of("b")} == {0 if after == 1 else after}


def test_an_odd_number_of_old_replicas_serves_until_the_gang_that_replaces_them_runs() -> None:
    bench = Bench([worker(n, threads=16) for n in (1, 2)])
    deploy(bench, 3, 1)
    bench.settle()
    goal = deploy(bench, 2, 2, "2")
    while bench.goal(goal).state is GoalState.PENDING:
        for action in bench.step().actions:
            bench.succeed(action)
        check_whole(bench)
        assert len(bench.tags(S.RUNNING)) >= 2


def test_scaling_adds_and_removes_whole_gangs() -> None:
    bench = Bench([worker(1, threads=16)])
    deploy(bench, 4, 2)
    bench.settle()
    before = set(members(bench))
    bench.update(num_replicas=8)
    bench.settle()
    assert before < set(members(bench))
    assert len(members(bench)) == 4
    bench.update(num_replicas=2)
    bench.settle()
    assert len(members(bench)) == 1
    check_whole(bench)


def test_a_gang_on_a_retiring_worker_moves_as_a_whole() -> None:
    bench = Bench([worker(n, threads=2) for n in (1, 2, 3)])
    deploy(bench, 2, 2, strategy="SPREAD")
    bench.settle()
    (gang,) = members(bench)
    leaving = bench.state.replicas[gang[0]].worker
    bench.observed.workers[str(leaving)] = worker(int(str(leaving)[1:]), threads=2, is_retiring=True)
    for _ in range(10):
        for action in bench.step().actions:
            bench.succeed(action)
        check_whole(bench)
        assert len(bench.tags(S.RUNNING)) >= 2
    assert gang not in members(bench)
    assert leaving not in {each.worker for each in bench.state.replicas_of("b")}


@given(
    threads=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    count=st.integers(1, 6),
    strategy=st.sampled_from(["PACK", "SPREAD"]),
    most=st.sampled_from([None, 1, 2]),
    seed=st.integers(0, 9),
)
def test_a_gang_is_placed_if_and_only_if_there_is_room(
    threads: list[int], count: int, strategy: str, most: int | None, seed: int
) -> None:
    rng = random.Random(seed)
    workers = [worker(n, threads=each, host=f"h{rng.randrange(3)}") for n, each in enumerate(threads, 1)]
    config = {
        "num_replicas": 6 * count,
        "gang_scheduling_config": {"gang_size": count, "gang_placement_strategy": strategy},
        "max_replicas_per_node": most,
    }
    wanted = backend(config=config, actor_options=ActorOptions(num_cpus=1))
    trial = TentativeUsage(state_of(wanted), {})
    hosts: dict[str, int] = {}
    for each in workers:
        hosts[each.host] = hosts.get(each.host, 0) + each.threads
    room = sum(min(total, most or total) for total in hosts.values())
    gang = [replica(f"b#{n}", S.SHOULD_START, demand={"CPU": 1}) for n in range(count)]
    found = place(trial, workers, gangs.demand_of_gang(wanted, gang))
    assert (found is not None) == (room >= count)
    if found is not None:
        for each in workers:
            assert found.count(each.address) <= each.threads


def test_replicas_without_gangs_are_decided_as_before() -> None:
    wanted = backend(num_replicas=2)
    steps = gangs.next_steps(wanted, [replica("b#1")], max_surge=1, leaving=(), criteria=EvictionCriteria())
    assert (steps.start, steps.stop) == (1, ())
    assert gangs.broken({"b#1": replica("b#1")}) == []
