"""The roster: which replica gets the next request, and that it costs the same among ten and a thousand."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.data.roster import BUSY_S, LONG_BUSY_S, NEAR_FACTOR, NEAR_LEAD, REPORT_S, ReplicaEntry, Roster
from daskserve.errors import ReplicaBusyError
from daskserve.types import ActorAddress, Load

HERE = "here"


def roster_of(*tags: str, concurrency: int = 1, near: str = "") -> Roster:
    """Return a roster of replicas, of which those named by a letter of ``near`` live in this process."""
    roster = Roster(lambda address: address.worker == HERE)
    publish(roster, *tags, concurrency=concurrency, near=near)
    return roster


def publish(roster: Roster, *tags: str, concurrency: int = 1, near: str = "", incarnation: int = 1) -> None:
    published = {tag: (HERE if tag in near else f"worker-of-{tag}", incarnation) for tag in tags}
    roster.update(published, concurrency, lambda tag: f"i/replica/{tag}")


def take_all(roster: Roster, now: float = 0.0, seed: int = 1) -> list[ReplicaEntry]:
    rng = random.Random(seed)
    taken = []
    while (entry := roster.take(now, rng)) is not None:
        taken.append(entry)
    return taken


# ---- room


def test_each_replica_is_given_as_many_as_it_may_run() -> None:
    roster = roster_of("a", "b", "c", concurrency=3)
    taken = take_all(roster)
    assert Counter(each.tag for each in taken) == {"a": 3, "b": 3, "c": 3}
    roster.give_back(taken[4])
    assert [each.tag for each in take_all(roster)] == [taken[4].tag]
    assert roster.in_flight == 9


def test_one_that_is_set_aside_comes_back_in_its_time_and_no_sooner() -> None:
    roster = roster_of("a", "b")
    (a, b) = sorted(take_all(roster), key=lambda each: each.tag)
    roster.set_aside(a, 2.0)
    roster.set_aside(b, 1.0)
    roster.give_back(a)
    roster.give_back(b)
    assert roster.next_return() == 1.0
    assert take_all(roster, now=0.99) == []
    assert take_all(roster, now=1.0) == [b]
    assert take_all(roster, now=2.0) == [a]
    assert roster.next_return() is None


def test_one_that_is_set_aside_twice_stays_away_for_the_longer_time() -> None:
    roster = roster_of("a", concurrency=2)
    a, _ = take_all(roster)
    for until in (2.0, 1.0):
        roster.set_aside(a, until)
        roster.give_back(a)
    assert take_all(roster, now=1.5) == []
    assert take_all(roster, now=2.0) == [a, a]


def test_one_that_stays_full_is_left_alone_for_longer_and_longer_and_by_chance() -> None:
    roster = roster_of("a", concurrency=2)
    rng, now, pauses = random.Random(1), 0.0, []
    for _ in range(40):
        entry = roster.take(now, rng)
        assert entry is not None
        roster.note_busy(entry, ReplicaBusyError(ongoing=2), now, rng)
        roster.give_back(entry)
        back = roster.next_return()
        assert back is not None
        pauses.append(back - now)
        now = back
    wanted = [BUSY_S, 2 * BUSY_S, 4 * BUSY_S, 8 * BUSY_S] + [LONG_BUSY_S] * 36
    assert all(0.5 <= pause / most <= 1 for pause, most in zip(pauses, wanted, strict=True))
    assert len({round(pause, 6) for pause in pauses}) == 40


@pytest.mark.parametrize(
    "what", ["an answer", "an answer of a full one", "a long time", "more slots", "a turn"]
)
def test_one_that_may_have_had_room_meanwhile_is_asked_again_soon(what: str) -> None:
    roster = roster_of("a", concurrency=2)
    rng, now = random.Random(1), 0.0
    for _ in range(9):
        (entry, *_) = take_all(roster, now)
        roster.note_busy(entry, ReplicaBusyError(ongoing=2), now, rng)
        for _ in range(2):
            roster.give_back(entry)
        now += LONG_BUSY_S
    if what == "a long time":
        now += REPORT_S
    elif what == "more slots":
        publish(roster, "a", concurrency=3)
    taken = take_all(roster, now)
    if what.startswith("an answer"):
        now += 0.001
        taken[0].report(Load(2 if "full" in what else 1), now)
        roster.give_back(taken[0])
    handled = 1 if what == "a turn" else 0
    roster.note_busy(taken[-1], ReplicaBusyError(ongoing=3, handled=handled), now, rng)
    back = roster.next_return()
    assert back is not None
    assert back - now <= BUSY_S


def test_one_that_is_full_again_after_it_had_room_is_left_alone_for_the_short_time_only() -> None:
    roster = roster_of("a", concurrency=2)
    rng, now = random.Random(1), 0.0
    taken = take_all(roster)
    for _ in range(9):
        now += LONG_BUSY_S
        roster.take(now, rng)
        roster.note_busy(taken[0], ReplicaBusyError(ongoing=2), now, rng)
        roster.give_back(taken[0])
    taken[1].report(Load(1), now)
    roster.give_back(taken[1])
    (entry, *_) = take_all(roster, now)
    roster.note_busy(entry, ReplicaBusyError(ongoing=2), now, rng)
    roster.give_back(entry)
    assert take_all(roster, now) == []
    assert take_all(roster, now + BUSY_S) == [entry]


def test_one_that_has_fewer_slots_than_is_known_here_is_left_alone_as_well() -> None:
    roster = roster_of("a", concurrency=4)
    (entry, *_) = take_all(roster)
    roster.note_busy(entry, ReplicaBusyError(ongoing=1), 0.0, random.Random(1))
    roster.give_back(entry)
    assert take_all(roster) == []


def test_an_answer_with_room_brings_back_one_that_was_full_and_not_one_that_was_lost() -> None:
    roster = roster_of("a", "b", concurrency=2)
    rng = random.Random(1)
    taken = {entry.tag: entry for entry in take_all(roster)}
    for entry in taken.values():
        roster.note_busy(entry, ReplicaBusyError(ongoing=2), 0.0, rng)
        roster.give_back(entry)
        entry.report(Load(2), 0.001)
    assert take_all(roster, 0.001) == []
    roster.set_aside(taken["b"], 1.0)
    for entry in taken.values():
        entry.report(Load(1), 0.001)
        roster.give_back(entry)
    assert take_all(roster, 0.001) == [taken["a"]] * 2
    assert take_all(roster, 1.0) == [taken["b"]] * 2


def test_one_that_comes_back_full_waits_for_an_answer() -> None:
    roster = roster_of("a")
    (a,) = take_all(roster)
    roster.set_aside(a, 1.0)
    assert take_all(roster, now=1.0) == []
    roster.give_back(a)
    assert take_all(roster, now=1.0) == [a]


def test_one_that_is_gone_gets_nothing_whatever_comes_back_from_it() -> None:
    roster = roster_of("a", "b")
    a = next(each for each in take_all(roster) if each.tag == "a")
    roster.set_aside(a, 1.0)
    publish(roster, "b")
    roster.give_back(a)
    assert roster.next_return() is None
    assert take_all(roster, now=1.0) == []
    assert roster.in_flight == 1
    roster.forget_worker("worker-of-b")
    assert repr(roster) == ""


@given(st.lists(st.tuples(st.sampled_from("tgabuf"), st.integers(0, 9)), max_size=60), st.integers(0, 2**32))
def test_whatever_happens_one_with_room_is_found_and_none_is_overfilled(
    steps: list[tuple[str, int]], seed: int
) -> None:
    """Against a model that looks at all replicas each time."""
    rng = random.Random(seed)
    tags = {"a", "b", "c", "d"}
    roster = roster_of(*tags, concurrency=2, near="ab")
    flying: list[ReplicaEntry] = []
    aside: dict[int, float] = {}
    now = 0.0
    for what, number in steps:
        now += 0.1
        if what == "t":
            counts = Counter(id(each) for each in flying)
            entries = list(roster._entries.values())
            open_ = [each for each in entries if counts[id(each)] < 2 and aside.get(id(each), 0.0) <= now]
            entry = roster.take(now, rng)
            assert (entry in open_) if open_ else (entry is None)
            flying.extend([] if entry is None else [entry])
        elif what == "g" and flying:
            entry = flying.pop(number % len(flying))
            entry.report(Load(number % 3), now)
            roster.give_back(entry)
        elif what == "a" and flying:
            entry = flying[number % len(flying)]
            roster.set_aside(entry, now + number / 10)
            aside[id(entry)] = max(aside.get(id(entry), 0.0), now + number / 10)
        elif what == "b" and flying:
            # It is left alone for less than a step of this test, and no longer and no shorter if it is lost.
            roster.note_busy(flying[number % len(flying)], ReplicaBusyError(ongoing=number % 3), now, rng)
        elif what == "u":
            tags ^= {"abcdef"[number % 6]}
            publish(roster, *tags, concurrency=2, near="ab")
        elif what == "f":
            roster.forget_worker(f"worker-of-{'cdef'[number % 4]}")
    for entry in flying:
        roster.give_back(entry)
    assert roster.in_flight == 0
    assert sum(each.in_flight for each in roster._entries.values()) == 0


# ---- which one


def test_a_replica_of_this_process_is_preferred_but_not_at_any_price() -> None:
    roster = roster_of("n", "f", concurrency=100, near="n")
    taken = Counter(roster.take(0.0, random.Random(1)).tag for _ in range(60))  # type: ignore[union-attr]
    assert taken["n"] == pytest.approx(NEAR_FACTOR * taken["f"] + NEAR_LEAD, abs=1)
    assert taken["f"] > 10


def test_what_is_known_of_far_replicas_counts_for_the_near_one() -> None:
    roster = roster_of("n", "f", concurrency=100, near="n")
    roster._entries["f"].report(Load(40, 0), 0.0)
    rng = random.Random(1)
    assert {roster.take(0.0, rng).tag for _ in range(50)} == {"n"}  # type: ignore[union-attr]
    assert roster.take(REPORT_S, rng).tag == "f"  # type: ignore[union-attr]  # by then it says nothing


def test_a_near_replica_that_is_full_does_not_hold_up_anybody() -> None:
    roster = roster_of("n", "f", near="n")
    assert [each.tag for each in take_all(roster)] == ["n", "f"]


def test_one_that_joins_a_backend_in_service_is_the_next_to_be_asked() -> None:
    many = [f"r{number}" for number in range(100)]
    roster = roster_of(*many, concurrency=10)
    rng = random.Random(1)
    for _ in range(50):
        roster.take(0.0, rng)
    publish(roster, *many, "x", "y", concurrency=10)
    publish(roster, *many, "x", "y", "z", concurrency=10)
    assert [roster.take(0.0, rng).tag for _ in range(3)] == ["x", "y", "z"]  # type: ignore[union-attr]
    assert "x" not in {roster.take(0.0, rng).tag for _ in range(20)}  # type: ignore[union-attr]


def test_a_newcomer_that_has_gone_again_is_nobodys_next() -> None:
    roster = roster_of("a", concurrency=9)
    publish(roster, "a", "b", concurrency=9)
    publish(roster, "a", concurrency=9)
    assert roster.take(0.0, random.Random(1)).tag == "a"  # type: ignore[union-attr]


# ---- what it costs


def operations(work: Callable[[], Any]) -> int:
    """Return how many steps of the interpreter a piece of Python takes."""
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


def idle(size: int) -> Roster:
    return roster_of(*map(str, range(size)), concurrency=4)


def all_but_one_full(size: int) -> Roster:
    roster = roster_of(*map(str, range(size)), concurrency=1)
    roster.give_back(take_all(roster)[size // 2])
    return roster


def half_set_aside(size: int) -> Roster:
    roster = idle(size)
    for number in range(0, size, 2):
        roster.set_aside(roster._entries[str(number)], 1.0)
    return roster


def all_set_aside_but_one(size: int) -> Roster:
    roster = idle(size)
    for number in range(1, size):
        roster.set_aside(roster._entries[str(number)], 1.0)
    return roster


@pytest.mark.parametrize("make", [idle, all_but_one_full, half_set_aside, all_set_aside_but_one])
def test_assigning_costs_the_same_among_a_thousand(make: Callable[[int], Roster]) -> None:
    def cost(size: int) -> int:
        roster, rng = make(size), random.Random(1)

        def work() -> None:
            for _ in range(20):
                entry = roster.take(0.5, rng)
                assert entry is not None
                roster.give_back(entry)

        return operations(work)

    assert cost(1000) <= 1.3 * cost(10)


def test_finding_none_costs_the_same_among_a_thousand() -> None:
    def cost(size: int) -> int:
        roster, rng = roster_of(*map(str, range(size))), random.Random(1)
        for entry in take_all(roster):
            roster.set_aside(entry, 1.0)

        def work() -> None:
            assert roster.take(0.5, rng) is None
            assert roster.next_return() == 1.0

        return operations(work)

    assert cost(1000) <= 1.3 * cost(10)


def test_addresses_name_the_replica() -> None:
    entry = roster_of("b#X").take(0.0, random.Random(1))
    assert entry is not None
    assert entry.address == ActorAddress("i/replica/b#X", "worker-of-b#X", 1)
