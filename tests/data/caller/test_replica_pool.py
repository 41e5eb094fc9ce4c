"""The pool: the choice of the next replica, at a cost that does not grow with their number."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind, Load, Reachability
from daskserve.data.caller.pool.pooled_replica import BATCH_REFUSAL_S, REPORT_S, PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool, defer, end_deferral
from daskserve.data.caller.routing.queued_request import place_in_queue
from daskserve.options.fields.priority import BATCH_PRIORITY

HERE = "here"


def pool_of(*tags: str, concurrency: int = 1, local: str = "") -> ReplicaPool:
    """Return a pool of replicas; the replicas named by a letter of ``local`` are in this process."""
    pool = ReplicaPool(lambda address: address.worker == HERE)
    publish(pool, *tags, concurrency=concurrency, local=local)
    return pool


def publish(
    pool: ReplicaPool, *tags: str, concurrency: int = 1, local: str = "", incarnation: int = 1
) -> None:
    published = {tag: (HERE if tag in local else f"worker-of-{tag}", incarnation) for tag in tags}
    pool.update(published, concurrency, lambda tag: f"i/replica/{tag}")


def take_all(pool: ReplicaPool, now: float = 0.0, seed: int = 1) -> list[PooledReplica]:
    rng = random.Random(seed)
    taken = []
    while (entry := pool.take(now, rng)) is not None:
        taken.append(entry)
    return taken


# ---- room


def test_a_suspended_replica_returns_exactly_when_its_suspension_ends() -> None:
    pool = pool_of("a", "b")
    (a, b) = sorted(take_all(pool), key=lambda each: each.tag)
    pool.suspend(a, 2.0)
    pool.suspend(b, 1.0)
    pool.release(a)
    pool.release(b)
    assert pool.next_resume_at() == 1.0
    assert take_all(pool, now=0.99) == []
    assert take_all(pool, now=1.0) == [b]
    assert take_all(pool, now=2.0) == [a]
    assert pool.next_resume_at() is None


def test_a_request_queues_only_if_no_replica_has_room_and_at_the_less_loaded_one() -> None:
    pool = pool_of("a", "b", "c", concurrency=2)
    taken = {entry.tag: entry for entry in take_all(pool)}
    pool.note_busy(taken["a"], 2, 0.0, was_queued=False)
    pool.report(taken["b"], Load(2, 5), 0.0)
    for entry in taken.values():
        pool.release(entry)
        pool.release(entry)
    assert [each.tag for each in take_all(pool)] == ["c", "c", "a", "b"]


def test_a_batch_request_that_waits_for_its_slot_leaves_the_replica_to_live_ones() -> None:
    pool = pool_of("a", concurrency=2)
    (a, _) = take_all(pool)
    pool.note_busy(a, 1, 0.0, was_queued=False, priority=-50)
    pool.release(a)
    (waiting,) = take_all(pool)
    assert not waiting.has_queued_request
    defer(pool, a)
    (live,) = take_all(pool)
    assert (live, live.has_queued_request, live.in_flight, pool.in_flight) == (a, False, 2, 3)
    pool.release(a)
    end_deferral(pool, a)
    assert take_all(pool) == []
    pool.release(a)
    pool.release(a)
    assert len(take_all(pool)) == 2


def of_priority(priority: int) -> Any:
    """Return `WaitingRequests` whose requests have one priority."""
    return SimpleNamespace(priority_of=lambda envelope: priority, routing=None)


def test_a_batch_request_goes_past_a_replica_that_is_kept_free() -> None:
    pool, rng = pool_of("a", "b"), random.Random(1)
    a, b = sorted(take_all(pool), key=lambda each: each.tag)
    pool.release(a)
    pool.note_busy(a, 0, 0.0, was_queued=False, priority=BATCH_PRIORITY)
    batch, live = Envelope(EnvelopeKind.CALL, {}), Envelope(EnvelopeKind.CALL, {})
    (taken,) = take_all(pool)
    assert taken is a
    place = partial(place_in_queue, pool, a, now=1.0, rng=rng)
    assert place(live, of_priority(0)) == (a, False, False)
    assert place(batch, of_priority(BATCH_PRIORITY)) == (b, True, True)
    defer(pool, b)  # as `QueuedRequest` does
    assert (a.in_flight, a.deferred.count, b.in_flight, b.deferred.count) == (0, 0, 1, 1)
    assert take_all(pool) == [a]
    end_deferral(pool, b)
    for each in (a, b, b):
        pool.release(each)
    # If it is the only replica, the request waits there.
    pool.suspend(b, 9.0)
    assert take_all(pool) == [a]
    assert place(batch, of_priority(BATCH_PRIORITY)) == (a, True, True)
    assert place(batch, of_priority(BATCH_PRIORITY), now=BATCH_REFUSAL_S) == (a, False, False)


@each_case("what", ["an answer", "a long time", "a new one"])
def test_a_replica_with_room_again_gets_as_many_requests_as_its_concurrency(what: str) -> None:
    pool = pool_of("a", concurrency=2)
    (a, _) = take_all(pool)
    pool.note_busy(a, 2, 0.0, was_queued=False)
    pool.release(a)
    now = 0.001
    if what == "an answer":
        pool.report(a, Load(1, 9), now)
    elif what == "a long time":
        now = REPORT_S
    else:
        publish(pool, "a", concurrency=2, incarnation=2)
    pool.release(a)
    taken = take_all(pool, now)
    assert len(taken) == 2
    assert not any(each.has_queued_request for each in taken)


def test_full_replicas_are_tried_again_one_after_the_other() -> None:
    pool = pool_of(*"abcdef", concurrency=2)
    for entry in take_all(pool):
        pool.report(entry, Load(2), 0.0)
        pool.release(entry)
    taken = [entry for entry in take_all(pool, REPORT_S) if not entry.has_queued_request]
    assert len(taken) > 2


def test_a_replica_with_fewer_slots_than_published_counts_as_full() -> None:
    pool = pool_of("a", concurrency=4)
    (entry, *_) = take_all(pool)
    pool.note_busy(entry, 1, 0.0, was_queued=False)
    pool.release(entry)
    assert take_all(pool) == [entry]
    assert entry.has_queued_request


@given(st.lists(st.tuples(st.sampled_from("tglabuf"), st.integers(0, 9)), max_size=60), st.integers(0, 2**32))
def test_random_events_never_hide_a_free_replica_or_overfill_one(
    steps: list[tuple[str, int]], seed: int
) -> None:
    """Compared with a model that checks all replicas each time."""
    rng = random.Random(seed)
    tags = {"a", "b", "c", "d"}
    pool = pool_of(*tags, concurrency=2, local="ab")
    flying: list[PooledReplica] = []
    queued: list[PooledReplica] = []
    aside: dict[int, float] = {}
    now = 0.0
    for what, number in steps:
        now += 0.1
        if what == "t":
            counts = Counter(id(each) for each in flying)
            entries = list(pool._entries.values())
            open_ = [each for each in entries if counts[id(each)] < 2 and aside.get(id(each), 0.0) <= now]
            fit = [each for each in open_ if each not in queued]
            has_room = any(not each.is_full for each in fit)
            entry = pool.take(now, rng)
            assert (entry in fit) if fit else (entry is None)
            if entry is not None:
                assert not (has_room and entry.has_queued_request)
                flying.append(entry)
                queued += [entry] * entry.has_queued_request
        elif what == "l" and queued:
            pool.leave_queue(queued.pop(number % len(queued)))
        elif what == "g" and (ending := [each for each in flying if each not in queued]):
            entry = ending[number % len(ending)]
            flying.remove(entry)
            pool.report(entry, Load(number % 3), now)
            pool.release(entry)
        elif what == "a" and flying:
            entry = flying[number % len(flying)]
            pool.suspend(entry, now + number / 10)
            aside[id(entry)] = max(aside.get(id(entry), 0.0), now + number / 10)
        elif what == "b" and flying:
            # A replica with a queue is suspended for less than a step of this test.
            entry = flying[number % len(flying)]
            pool.note_busy(entry, number % 3, now, was_queued=number > 4)
        elif what == "u":
            tags ^= {"abcdef"[number % 6]}
            publish(pool, *tags, concurrency=2, local="ab")
        elif what == "f":
            pool.forget_worker(f"worker-of-{'cdef'[number % 4]}")
        assert pool.queued == len(queued)
    for entry in flying:
        pool.leave_queue(entry)
        pool.release(entry)
    assert (pool.in_flight, pool.queued) == (0, 0)
    assert sum(each.in_flight for each in pool._entries.values()) == 0


# ---- which one


def served_at(pool: ReplicaPool, pace_s: float, count: int = 50) -> None:
    """Let the local replica answer requests at a pace."""
    rng = random.Random(1)
    for number in range(count):
        entry = pool.take(number * pace_s, rng)
        assert entry is not None
        pool.report(entry, Load(), (number + 1) * pace_s)
        pool.release(entry)
        assert (entry.tag, entry.pace_s) == ("n", pytest.approx(pace_s))


@each_case(
    ("pace_s", "lead", "factor"),
    [
        (0.0001, 60, 0),  # a hop takes more time of this process than the request
        (0.0002, 10, 2.2),
        (0.001, 1.1, 1.22),
        (0.1, 0, 1.1),
        (None, 0, 1.1),  # no answer yet
    ],
)
def test_a_local_replica_is_preferred_while_its_queue_costs_less_than_a_hop(
    pace_s: float | None, lead: float, factor: float
) -> None:
    pool = pool_of("n", "f", concurrency=100, local="n")
    now = 0.0
    if pace_s is not None:
        served_at(pool, pace_s)
        now = 50 * pace_s
    taken = Counter(pool.take(now, random.Random(1)).tag for _ in range(60))  # type: ignore[union-attr]
    assert taken["n"] == pytest.approx(factor * taken["f"] + lead, abs=2)


@each_case(
    ("answer_s", "together", "spread"),
    [
        (0.0001, 9, 3),  # nine of them take a millisecond
        (0.0001, 1, 10),  # they do not arrive together
        (0.00001, 20, 1),
        (0.0006, 10, 10),
        (None, 10, 10),  # no answer yet
    ],
)
def test_light_requests_that_arrive_together_go_to_the_same_local_replica(
    answer_s: float | None, together: int, spread: int
) -> None:
    pool = ReplicaPool(lambda _: True)
    publish(pool, *(f"r{number}" for number in range(10)), concurrency=100)
    rng, now = random.Random(1), 0.0

    def take() -> PooledReplica:
        entry = pool.take(now, rng)
        assert entry is not None
        return entry

    taken = [take()]
    for _ in range(0 if answer_s is None else 1000):
        now += answer_s or 0.0
        taken.append(take())
        entry = taken.pop(0)
        pool.report(entry, Load(), now)
        pool.release(entry)
    pool.release(taken.pop())
    now += 1.0  # a pause is not taken for a slow answer
    for number in range(20):
        now += 0.01 * (number % together == 0)
        taken.append(take())
    assert len({each.tag for each in taken}) == pytest.approx(spread, abs=1)


def test_a_group_of_requests_ends_at_a_replica_without_room() -> None:
    pool = ReplicaPool(lambda _: True)
    publish(pool, "a", "b", "c", concurrency=2)
    rng = random.Random(1)
    for number in range(1000):
        entry = pool.take(number * 0.00001, rng)
        assert entry is not None
        pool.report(entry, Load(), (number + 1) * 0.00001)
        pool.release(entry)
    taken = [entry.tag for _ in range(6) if (entry := pool.take(2.0, rng)) is not None]
    assert len(set(taken[:2])) == len(set(taken[2:4])) == len(set(taken[4:])) == 1
    assert len(set(taken)) == 3


def test_an_idle_replica_is_found_among_many_busy_ones() -> None:
    names = [f"r{number}" for number in range(200)]
    rng = random.Random(1)
    for local in ("", "r7"):
        pool = ReplicaPool(lambda address, local=local: address.worker == f"worker-of-{local}")  # type: ignore[misc]
        publish(pool, *names, concurrency=10)
        entries = {}
        for _ in names:
            entry = pool.take(0.0, rng)
            assert entry is not None
            assert entry.tag not in entries, "another replica has no request"
            entries[entry.tag] = entry
        for tag in ("r100", "r3"):
            pool.report(entries[tag], Load(), 1.0)
            pool.release(entries[tag])
        assert {pool.take(1.0, rng).tag for _ in range(2)} == {"r100", "r3"}  # type: ignore[union-attr]


def test_a_replica_that_is_busy_with_the_requests_of_other_processes_is_not_idle() -> None:
    pool = pool_of("a", "b", "c", concurrency=10)
    rng = random.Random(1)
    entries = {entry.tag: entry for entry in (pool.take(0.0, rng) for _ in range(3)) if entry is not None}
    for tag, load in {"a": Load(5), "b": Load(), "c": Load(5)}.items():
        pool.report(entries[tag], load, 0.1)
        pool.release(entries[tag])
    assert pool.take(0.1, rng) is entries["b"]


def test_requests_one_after_the_other_mostly_go_to_the_slow_replica_that_answered_last() -> None:
    pool = pool_of("a", "b", "c", concurrency=10)
    rng = random.Random(1)
    served: list[str] = []
    for number in range(400):
        entry = pool.take(number * 0.02, rng)
        assert entry is not None
        served.append(entry.tag)
        pool.report(entry, Load(), number * 0.02 + 0.02)
        pool.release(entry)
    changes = sum(one != other for one, other in pairwise(served))
    assert 0 < changes < 40
    assert set(served) == {"a", "b", "c"}


def test_requests_one_after_the_other_are_spread_over_fast_replicas() -> None:
    pool = pool_of("a", "b", "c", concurrency=10)
    rng = random.Random(1)
    served: Counter[str] = Counter()
    for number in range(300):
        entry = pool.take(number * 0.001, rng)
        assert entry is not None
        served[entry.tag] += 1
        pool.report(entry, Load(), number * 0.001 + 0.001)
        pool.release(entry)
    assert min(served.values()) > 60


def test_a_refusal_does_not_change_the_pace() -> None:
    pool = pool_of("n", local="n")
    served_at(pool, 0.1)
    entry = pool.take(5.0, random.Random(1))
    assert entry is not None
    pool.note_busy(entry, 1, 5.001, was_queued=False)
    assert entry.pace_s == pytest.approx(0.1)


def test_reported_load_of_a_remote_replica_counts_against_the_local_one() -> None:
    pool = pool_of("n", "f", concurrency=100, local="n")
    pool.report(pool._entries["f"], Load(50, 0), 0.0)
    rng = random.Random(1)
    assert {pool.take(0.0, rng).tag for _ in range(50)} == {"n"}  # type: ignore[union-attr]
    assert pool.take(REPORT_S, rng).tag == "f"  # type: ignore[union-attr]  # by then it says nothing


# ---- what it costs


def operations(work: Callable[[], Any]) -> int:
    """Return the number of interpreter steps of some code."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def idle(size: int) -> ReplicaPool:
    return pool_of(*map(str, range(size)), concurrency=4)


def all_but_one_full(size: int) -> ReplicaPool:
    pool = pool_of(*map(str, range(size)), concurrency=1)
    pool.release(take_all(pool)[size // 2])
    return pool


def half_suspended(size: int) -> ReplicaPool:
    pool = idle(size)
    for number in range(0, size, 2):
        pool.suspend(pool._entries[str(number)], 1.0)
    return pool


def all_suspended_but_one(size: int) -> ReplicaPool:
    pool = idle(size)
    for number in range(1, size):
        pool.suspend(pool._entries[str(number)], 1.0)
    return pool


@each_case("make", [idle, all_but_one_full, half_suspended, all_suspended_but_one])
def test_choosing_costs_the_same_among_a_thousand_replicas(make: Callable[[int], ReplicaPool]) -> None:
    def cost(size: int) -> int:
        pool, rng = make(size), random.Random(1)

        def work() -> None:
            for _ in range(20):
                entry = pool.take(0.5, rng)
                assert entry is not None
                pool.release(entry)

        return operations(work)

    assert cost(1000) <= 1.3 * cost(10)


def test_finding_no_replica_costs_the_same_among_a_thousand() -> None:
    def cost(size: int) -> int:
        pool, rng = pool_of(*map(str, range(size))), random.Random(1)
        for entry in take_all(pool):
            pool.suspend(entry, 1.0)

        def work() -> None:
            assert pool.take(0.5, rng) is None
            assert pool.next_resume_at() == 1.0

        return operations(work)

    assert cost(1000) <= 1.3 * cost(10)


def test_addresses_name_the_replica() -> None:
    entry = pool_of("b#X").take(0.0, random.Random(1))
    assert entry is not None
    assert entry.address == ActorAddress("i/replica/b#X", "worker-of-b#X", 1)


# ---- routes


def routed(*tags: str, concurrency: int = 2) -> tuple[ReplicaPool, dict[str, Reachability | None]]:
    """Return a pool and the routes by tag, which a test may change before `ReplicaPool.note_route`."""
    routes: dict[str, Reachability | None] = {}

    def route_to(worker: str) -> Reachability | None:
        return routes.get(worker.removeprefix("worker-of-"), Reachability.DIRECT)

    pool = ReplicaPool(lambda address: address.worker == HERE, route_to)
    publish(pool, *tags, concurrency=concurrency)
    return pool, routes


def change(
    pool: ReplicaPool, routes: dict[str, Reachability | None], tag: str, route: Reachability | None
) -> None:
    routes[tag] = route
    pool.note_route(f"worker-of-{tag}")


def test_a_replica_that_cannot_be_reached_gets_no_requests_until_it_can() -> None:
    pool, routes = routed("a", "b")
    change(pool, routes, "a", Reachability.NONE)
    assert [each.tag for each in take_all(pool)] == ["b", "b"]
    assert pool.next_resume_at() is None, "time alone does not bring it back"
    change(pool, routes, "a", Reachability.DIRECT)
    assert [each.tag for each in take_all(pool)] == ["a", "a"]


def test_a_replica_published_on_a_worker_that_cannot_be_reached_is_left_out_at_once() -> None:
    pool, routes = routed("a")
    routes["b"] = Reachability.NONE
    publish(pool, "a", "b", concurrency=2)
    assert {each.tag for each in take_all(pool)} == {"a"}


def test_the_way_through_the_scheduler_is_for_requests_that_no_other_replica_can_take() -> None:
    pool, routes = routed("a", "b", "c")
    change(pool, routes, "b", Reachability.SCHEDULER)
    change(pool, routes, "c", Reachability.NONE)
    taken = take_all(pool)
    assert [each.tag for each in taken] == ["a", "a", "b", "b"]
    pool.release(taken[0])
    pool.release(taken[2])
    assert [each.tag for each in take_all(pool)] == ["a", "b"]


def test_replicas_behind_the_scheduler_share_the_requests_if_there_are_no_others() -> None:
    pool, routes = routed("a", "b", concurrency=10)
    for tag in ("a", "b"):
        change(pool, routes, tag, Reachability.SCHEDULER)
    rng = random.Random(1)
    taken = Counter()
    for _ in range(100):
        entry = pool.take(0.0, rng)
        assert entry is not None
        taken[entry.tag] += 1
        pool.release(entry)
    assert min(taken["a"], taken["b"]) > 20


def test_a_change_of_the_route_keeps_what_is_in_flight() -> None:
    pool, routes = routed("a")
    (first, _) = take_all(pool)
    change(pool, routes, "a", Reachability.SCHEDULER)
    assert take_all(pool) == []
    pool.release(first)
    assert [each.in_flight for each in take_all(pool)] == [2]
