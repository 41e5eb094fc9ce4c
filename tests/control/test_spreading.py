"""Replicas move to better workers, one at a time, after workers have joined."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from control_harness import backend, replica, state_of, worker
from controller_harness import Stage, boom, staged
from tables import each_case

from daskserve.common.types import Location, ReplicaState, WorkerInfo
from daskserve.control.observed.observed import Notes, Observed
from daskserve.control.placement.rebalancing import COMPARISONS, SEARCH_S, Rebalancer
from daskserve.control.records.state import State
from daskserve.options.http import HTTPOptions


def observed(*workers: WorkerInfo, **levels: Any) -> Observed:
    return Observed(workers={each.address: each for each in workers}, **levels)


def crowd(count: int, tag: str = "b", on: str = "w1", **fields: Any) -> State:
    """One backend, with all replicas on one worker."""
    record = backend(tag, config={"num_replicas": count, **fields})
    return state_of(record, *(replica(f"{tag}#{n}", worker=on) for n in range(count)))


def moves(state: State, seen: Observed, avoid: tuple[str, ...] = ()) -> str | None:
    """Return the replica that moves once the delay is over."""
    spreader = Rebalancer()
    assert spreader.next_move(state, seen, avoid, 0.0) is None
    found = spreader.next_move(state, seen, avoid, 31.0)
    return None if found is None else found.tag


W1, W2 = worker(1, host="h1"), worker(2, host="h2")


def test_a_crowded_deployment_has_a_replica_that_moves() -> None:
    assert moves(crowd(2), observed(W1, W2)) == "b#1"
    assert moves(crowd(2), observed(W1)) is None
    assert moves(crowd(1), observed(W1, W2)) is None
    assert moves(crowd(2), observed(W1, worker(2, host="h2", is_system=True))) is None


@each_case(
    ("counts", "is_moving"),
    [((2, 1), False), ((3, 1), True), ((1, 1), False), ((2, 0), True), ((4, 2), True), ((3, 2), False)],
)
def test_moves_end_once_replicas_are_spread(counts: tuple[int, int], is_moving: bool) -> None:
    workers = [each for each, count in zip(("w1", "w2"), counts, strict=True) for _ in range(count)]
    replicas = [replica(f"b#{n}", worker=each) for n, each in enumerate(workers)]
    state = state_of(backend(num_replicas=sum(counts)), *replicas)
    assert (moves(state, observed(W1, W2)) is not None) is is_moving


def test_hosts_count_where_workers_are_alike() -> None:
    workers = [worker(n, host="h1") for n in (1, 2, 3)] + [worker(4, host="h2")]
    state = state_of(backend(num_replicas=3), *(replica(f"b#{n}", worker=f"w{n}") for n in (1, 2, 3)))
    assert moves(state, observed(*workers)) == "b#3"


def test_an_empty_new_worker_takes_over_from_one_with_several_deployments() -> None:
    records = [each for tag in ("a", "b") for each in (backend(tag), replica(f"{tag}#1"))]
    assert moves(state_of(*records), observed(W1, W2)) == "a#1"
    assert moves(state_of(*records[:2]), observed(W1, W2)) is None
    assert moves(state_of(*records[:2]), observed(W1, W2), avoid=("w1",)) == "a#1"
    assert moves(state_of(*records[:2]), observed(W1, W2), avoid=("w1", "w2")) is None


def test_a_worker_that_was_emptied_takes_over_no_replicas() -> None:
    spreader, seen = Rebalancer(), observed(W1, W2)
    records = [each for tag in ("a", "b") for each in (backend(tag), replica(f"{tag}#1"))]
    before = state_of(*records, backend("c"), replica("c#1", worker="w2"))
    assert spreader.next_move(before, seen, (), 0.0) is None
    assert [spreader.next_move(state_of(*records), seen, (), 10.0 * n) for n in range(1, 10)] == [None] * 9


@each_case(
    "why",
    [
        {"placement": "PACK"},
        {"rebalance_after_s": None},
        {"placement_group_bundles": [{"CPU": 1}]},
        {"gang_scheduling_config": {"gang_size": 2}},
    ],
)
def test_replicas_with_their_own_placement_are_not_moved(why: dict[str, Any]) -> None:
    assert moves(crowd(2, **why), observed(W1, W2)) is None


@each_case(
    "levels",
    [
        {"is_adaptive": True},
        {"notes": {"b": Notes(failures=1)}},
        {"notes": {"b": Notes(waiting="no room")}},
        {"moving": "x#1"},
    ],
)
def test_nothing_moves_for_now(levels: dict[str, Any]) -> None:
    assert moves(crowd(2), observed(W1, W2, **levels)) is None


def test_unfinished_backends_and_deployment_actors_stay() -> None:
    seen = observed(W1, W2)
    two = [replica("b#1"), replica("b#2", ReplicaState.STARTING)]
    assert moves(state_of(backend(num_replicas=2), *two), seen) is None
    two = [replica("b#1"), replica("b#2")]
    for fields in ({"goal": "g"}, {"version": "v2"}, {"actor_of": ("app",)}, {"is_deleting": True}):
        assert moves(state_of(backend(num_replicas=2, **fields), *two), seen) is None, fields
    assert moves(state_of(backend(num_replicas=3), *two), seen) is None


def test_only_workers_with_room_are_better() -> None:
    full = worker(2, host="h2", threads=1)
    state = state_of(
        backend(num_replicas=2),
        *(replica(f"b#{n}", demand={"CPU": 1}) for n in range(2)),
        backend("other"),
        replica("other#1", worker="w2", demand={"CPU": 1}),
    )
    state.backends["b"].actor_options.num_cpus = 1
    assert moves(state, observed(W1, full)) is None
    assert moves(state, observed(W1, worker(2, host="h2", is_available=False))) is None


def test_a_search_compares_few_backends_and_gets_to_all() -> None:
    tags = [f"b{n:02}" for n in range(3 * COMPARISONS)]
    state = state_of(
        *(backend(tag, num_replicas=2) for tag in tags),
        *(replica(f"{tag}#{n}") for tag in tags for n in range(2)),
    )
    spreader, seen = Rebalancer(), observed(W1, W2)
    found = (spreader.next_move(state, seen, (), SEARCH_S * n) for n in itertools.count())
    waits = list(itertools.takewhile(lambda each: each is None, found))
    assert 30 / SEARCH_S <= len(waits) <= 30 / SEARCH_S + 4


# ---- with a controller


def places(stage: Stage) -> Counter[str]:
    return Counter(each.worker for each in stage.running.values())


@staged(workers=1)
async def test_replicas_move_to_workers_that_join_and_as_many_serve_all_the_time(stage: Stage) -> None:
    await stage.create(num_replicas=4)
    await stage.endpoint()
    stage.start_s = 1.0
    stage.cluster.add_worker()
    stage.cluster.add_worker()
    numbers = set()
    for _ in range(800):
        await stage.clock.sleep(0.1)
        numbers.add(len((await stage.published("backend/b"))["replicas"]))
    assert sorted(places(stage).values()) == [1, 1, 2]
    assert numbers == {4}, "routers learn of the new one as the old one goes"
    assert len(stage.started) == 4 + 2
    await stage.clock.sleep(300)
    assert len(stage.started) == 4 + 2


@staged(workers=1)
async def test_deployments_of_one_replica_use_a_new_worker_too(stage: Stage) -> None:
    for tag in "abcd":
        await stage.deploy(tag, f"/{tag}")
    (first,) = places(stage)
    stage.cluster.add_worker()
    await stage.clock.sleep(300)
    assert places(stage)[first] < 4
    started = len(stage.started)
    await stage.clock.sleep(300)
    assert len(stage.started) == started


@staged(workers=1)
async def test_a_replica_stays_if_the_new_one_does_not_start(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    before = set(stage.running)
    stage.start = boom()
    stage.cluster.add_worker()
    await stage.clock.sleep(120)
    assert set(stage.running) == before
    assert len(stage.started) == 3, "it is not tried for ever"


@staged(workers=1)
async def test_a_change_comes_before_a_move(stage: Stage) -> None:
    await stage.deploy("b", version="1", num_replicas=2)
    before = set(stage.running)
    stage.start_s = 5.0
    stage.cluster.add_worker()
    await stage.until(lambda: len(stage.started) == 3)
    stage.start_s = 0.1
    await stage.deploy("b", version="2", num_replicas=2)
    await stage.clock.sleep(120)
    assert len(stage.running_of("b")) == 2
    assert before.isdisjoint(stage.running)
    assert sorted(places(stage).values()) == [1, 1]


@staged(workers=3, http=HTTPOptions(location=Location.EVERY_WORKER))
async def test_where_every_worker_has_a_proxy_replicas_avoid_the_controller_alone(stage: Stage) -> None:
    await stage.run(graph={"front": ()})
    await stage.until(lambda: len(stage.proxies) == 3)
    await stage.deploy("b", "/b")
    controller = await stage.cluster.program.controller()
    assert controller.worker not in stage.replica_workers()
    assert len(stage.replica_workers()) == 2
