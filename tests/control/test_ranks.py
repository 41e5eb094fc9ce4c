"""Ranks: always unique, the same for a replica's life, and without gaps once changes are complete."""

from __future__ import annotations

from typing import Any

from control_harness import Bench, spec, worker
from hypothesis import given
from hypothesis import strategies as st

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend.actions import ReconfigureReplica, StartReplica
from daskserve.control.backend.ranks import are_valid, new_ranks, rank_info_of
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.observed.lifecycle import PLACED_STATES
from daskserve.control.records.records import GoalState, ReplicaRecord
from daskserve.errors import ReplicaStartError

BOOM = ReplicaStartError("the reconfiguration raised")
WORKERS = [worker(1, host="h1"), worker(2, host="h1"), worker(3, host="h2")]


def placed(bench: Bench) -> list[ReplicaRecord]:
    return [each for each in bench.state.replicas_of("b") if each.state in PLACED_STATES]


def ranks(bench: Bench) -> list[int]:
    return [each.rank[0] for each in placed(bench)]


def take(bench: Bench) -> None:
    """Let every replica answer like a real one, with its assigned rank."""
    for action in bench.step().actions:
        tag = action.replica.tag
        if isinstance(action, StartReplica | ReconfigureReplica):
            rank_info = rank_info_of(bench.state.backends["b"], bench.state.replicas[tag])
            assert rank_info is not None
            bench.observed.rank_infos[tag] = rank_info
        bench.succeed(action)


def rest(bench: Bench) -> None:
    while True:
        before = dict(bench.state.replicas)
        take(bench)
        if bench.state.replicas == before and not bench.last.actions:
            return


def test_ranks_number_all_replicas_their_hosts_and_those_on_a_host() -> None:
    bench = Bench(WORKERS)
    bench.create(num_replicas=4)
    rest(bench)
    assert sorted(ranks(bench)) == [0, 1, 2, 3]
    by_host: dict[int, list[int]] = {}
    for each in placed(bench):
        by_host.setdefault(each.rank[1], []).append(each.rank[2])
    assert {node: sorted(found) for node, found in by_host.items()} == {0: [0, 1], 1: [0, 1]}


def test_a_replacement_gets_the_rank_that_became_free() -> None:
    bench = Bench(WORKERS)
    bench.create(num_replicas=3)
    rest(bench)
    before = {each.tag: each.rank for each in placed(bench)}
    lost = placed(bench)[1]
    bench.observed.failed[lost.tag] = BOOM
    rest(bench)
    after = {each.tag: each.rank for each in placed(bench)}
    (new,) = after.keys() - before.keys()
    assert after[new][0] == lost.rank[0]
    assert {tag: rank for tag, rank in after.items() if tag != new} == {
        tag: rank for tag, rank in before.items() if tag != lost.tag
    }


def test_scaling_down_closes_gaps_notifies_the_moved_replicas_and_ends_when_they_know() -> None:
    bench = Bench(WORKERS[:1])
    bench.create(num_replicas=3)
    rest(bench)
    for each in placed(bench)[1:]:  # the first replica has no requests, so it stops
        busy = {"ongoing": 5, "ended": 0, "latency_counts": []}
        bench.observed.loads.answered("b", each.tag, busy, bench.now)
    goal = bench.update(num_replicas=2)
    bench.step()
    assert ranks(bench) == [1, 0]
    received = [each for each in bench.last.actions if isinstance(each, ReconfigureReplica)]
    assert len(received) == 2  # both are notified that there are two
    for action in bench.last.actions:
        if action not in received:
            bench.succeed(action)
    bench.step()
    assert bench.goal(goal).state is GoalState.PENDING
    rest(bench)
    assert bench.goal(goal).state is GoalState.DONE


def test_a_replica_that_refuses_its_new_rank_fails_the_change() -> None:
    bench = Bench(WORKERS)
    bench.create(num_replicas=2)
    rest(bench)
    goal = bench.update(num_replicas=3)
    (tag, *_) = [each.replica.tag for each in bench.step().actions if isinstance(each, ReconfigureReplica)]
    bench.observed.reconfigure_failed[tag] = BOOM
    bench.step()
    assert bench.goal(goal).state is GoalState.FAILED
    rest(bench)
    assert sorted(ranks(bench)) == [0, 1]


def test_a_lost_message_or_a_new_controller_repeats_what_a_replica_does_not_know() -> None:
    bench = Bench(WORKERS)
    bench.create(num_replicas=2)
    rest(bench)
    tag = placed(bench)[0].tag
    del bench.observed.rank_infos[tag]  # a new controller knows no ranks, and queries them first
    assert bench.step().actions == []
    bench.observed.rank_infos[tag] = (7, 0, 0, 9)
    (action,) = bench.step().actions
    assert isinstance(action, ReconfigureReplica)
    assert action.replica.tag == tag
    take(bench)
    assert bench.step().actions == []


@given(
    events=st.lists(
        st.sampled_from(["take", "lose worker", "fail", "up", "down", "deploy", "retire"]), max_size=30
    )
)
def test_ranks_are_different_always_stable_in_life_and_without_gaps_at_rest(events: list[str]) -> None:
    bench = Bench(WORKERS)
    wanted, version = 3, 1
    bench.deploy(version="1", num_replicas=wanted, timeout_s=None)
    rest(bench)
    for number, event in enumerate(events):
        before = {each.tag: each.rank[0] for each in placed(bench)}
        if event in ("up", "down", "deploy"):
            wanted = max(1, min(5, wanted + {"up": 1, "down": -1}.get(event, 0)))
            version += event == "deploy"
            outcome = backend_decisions.deploy(
                bench.state,
                spec(version=str(version), num_replicas=wanted, timeout_s=None, request_id=f"r{number}"),
                goal_id=f"g{number}",
                now=0.0,
            )
            bench.state.apply(outcome.change)
        elif event == "fail" and placed(bench):
            bench.observed.failed[placed(bench)[number % len(placed(bench))].tag] = BOOM
        elif event == "lose worker":
            bench.observed.lost_workers.add("w1")
            bench.step()
            bench.observed.lost_workers.clear()
        elif event == "retire":
            bench.observed.workers["w2"] = worker(2, host="h1", is_retiring=number % 2 == 0)
        take(bench)
        found = {each.tag: each.rank[0] for each in placed(bench)}
        assert len(set(found.values())) == len(found)
        moved = [tag for tag, rank in found.items() if before.get(tag, rank) != rank]
        assert all(before[tag] >= len(found) for tag in moved)
    bench.observed.workers["w2"] = WORKERS[1]
    bench.now += 100
    rest(bench)
    bench.now += 100
    rest(bench)
    running = bench.state.replicas_of("b")
    assert {each.state for each in running} == {S.RUNNING}
    assert sorted(ranks(bench)) == list(range(len(running)))
    hosts = {each.worker: bench.observed.host_of(each.worker or "") for each in running}
    assert {each.rank[1] for each in running} == set(range(len(set(hosts.values()))))
    assert all(
        bench.observed.rank_infos[each.tag] == rank_info_of(bench.state.backends["b"], each)
        for each in running
    )


def test_two_records_of_one_rank_are_distinguished() -> None:
    """Records of an older version have no ranks, and a damaged store may contain anything."""
    base = ReplicaRecord("b#1", "b", "v", "c", S.RUNNING, {}, "w1", 1)
    records = [base, ReplicaRecord("b#2", "b", "v", "c", S.RUNNING, {}, "w1", 1, rank=(0, 0, 0))]
    records.append(ReplicaRecord("b#3", "b", "v", "c", S.RUNNING, {}, "w1", 1, rank=(0, 0, 0)))
    found = list(new_ranks(records, ["h"] * 3, is_settled=False))
    assert found == [(1, 0, 1), (0, 0, 0), (2, 0, 2)]


@given(
    st.lists(st.tuples(st.sampled_from("hi"), st.tuples(*[st.integers(0, 3)] * 3)), max_size=4), st.booleans()
)
def test_ranks_are_right_exactly_if_none_changes(placed: list[tuple[str, Any]], is_settled: bool) -> None:
    hosts, ranks = [host for host, _ in placed], [rank for _, rank in placed]
    records = [
        ReplicaRecord(f"b#{n}", "b", "v", "c", S.RUNNING, {}, "w1", 1, rank=rank)
        for n, rank in enumerate(ranks)
    ]
    unchanged = list(new_ranks(records, hosts, is_settled=is_settled)) == ranks
    assert are_valid(ranks, hosts, is_settled=is_settled) is unchanged


def test_replicas_without_a_rank_get_one() -> None:
    assert not are_valid([(0, 0, 0), ()], ["h", "h"], is_settled=False)
