"""How many requests of batch jobs a replica runs at a time, so that live requests have room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tables import each_case

from daskserve.data.replica.requests.batch_admission import (
    FIRST_PAUSE_S,
    LIVE_S,
    STARVED_S,
    BatchAdmission,
    BatchLimit,
)

FIRST_OF_TWO, SECOND_OF_TWO, ONLY = (0, 0, 0, 2), (1, 0, 1, 2), (0, 0, 0, 1)


def run_full(limit: BatchLimit, rate_of: Callable[[int], float], began: float, for_s: float) -> float:
    """Let requests end while others wait, at a rate that depends on how many run; return the time."""
    now = began
    while now < began + for_s:
        running = limit.limit
        now += running / rate_of(running)
        for _ in range(running):
            limit.refused()
            limit.ended(running, now)
    return now


@each_case(
    ("most", "rate_of", "expected"),
    [
        (7, lambda running: running, 7),  # waits for something else
        (7, lambda running: 1.0, 1),  # computes, on one processor
        (7, lambda running: min(running, 2), 3),  # on two
        (15, lambda running: min(running, 8), 7),  # batches of up to 8: nearly as fast
        (99, lambda running: 20.0, 1),
        (1, lambda running: 1.0, 1),
    ],
)
def test_no_more_run_at_a_time_than_make_the_job_faster(
    most: int, rate_of: Callable[[int], float], expected: int
) -> None:
    limit = BatchLimit(most)
    run_full(limit, rate_of, 0.0, 200.0)
    assert limit.found == expected


def test_slow_code_is_seldom_measured_again() -> None:
    ran_s: Counter[int] = Counter()

    def rate_of(running: int) -> float:
        ran_s[running] += running
        return 1.0

    run_full(BatchLimit(7), rate_of, 0.0, 4000.0)
    assert ran_s[1] > 0.95 * ran_s.total()


def test_the_limit_follows_code_that_changes() -> None:
    limit = BatchLimit(7)
    now = run_full(limit, lambda running: 50.0, 0.0, 10 * FIRST_PAUSE_S)
    assert limit.found == 1
    run_full(limit, lambda running: 50.0 * running, now, 20 * FIRST_PAUSE_S)
    assert limit.found == 7


def test_a_maximum_that_stays_does_not_end_what_is_measured() -> None:
    """The controller publishes the maximum with each change of a config."""
    limits = BatchLimit(7), BatchLimit(7)
    now = 0.0
    for step in range(400):
        now += 1 / 50
        for limit in limits:
            limit.refused()
            limit.ended(limit.limit, now)
        if step % 20 == 0:
            limits[1].resize(7)
    assert limits[0].found == limits[1].found < 7
    limits[1].resize(limits[1].found - 1)
    assert limits[1].limit == limits[1].found == limits[0].found - 1


def test_a_job_that_leaves_slots_free_measures_nothing() -> None:
    limit = BatchLimit(7)
    for number in range(1000):
        limit.ended(3, float(number))
    assert limit.limit == 7


def test_the_first_of_several_replicas_with_one_slot_is_kept_free_while_there_are_live_requests() -> None:
    for rank_info, is_kept in ((FIRST_OF_TWO, True), (SECOND_OF_TWO, False), (ONLY, False)):
        room = BatchAdmission(1)
        assert room.has_room(1, rank_info, 0.0)
        room.began(0.0)
        room.ended(1.0, are_waiting=True)
        room.note_live(1, 1.0)
        assert room.has_room(1, rank_info, 2.0) is not is_kept
        assert room.has_room(1, rank_info, 1.0 + LIVE_S)
        room.note_live(1, STARVED_S)
        assert room.has_room(1, rank_info, STARVED_S), "the other replicas may not have started"


def test_a_replica_is_kept_free_only_if_its_code_is_known_to_run_alone() -> None:
    for rate_of, is_kept in ((lambda running: running, False), (lambda running: 1.0, True)):
        room = BatchAdmission(4)
        now = run_full(room._limit, rate_of, 0.0, 100.0)
        room.began(now)
        room.ended(now, are_waiting=False)
        room.note_live(1, now)
        assert room.has_room(4, FIRST_OF_TWO, now) is not is_kept
        assert not room.has_room(1, SECOND_OF_TWO, now), "one slot of several is for live requests"
    two_slots = BatchAdmission(2)
    two_slots.began(0.0)
    two_slots.ended(0.0, are_waiting=False)
    two_slots.note_live(1, 0.0)
    assert two_slots.has_room(2, FIRST_OF_TWO, 0.0)


def test_a_job_leaves_as_many_slots_as_live_requests_have_lately_taken() -> None:
    room = BatchAdmission(8)
    for live in (1, 2, 3, 2, 1):
        room.note_live(live, 1.0)

    def fill(now: float) -> int:
        while room.has_room(8 - room.ongoing, ONLY, now):
            room.began(now)
        found = room.ongoing
        for _ in range(found):
            room.ended(now, are_waiting=False)
        return found

    assert fill(1.0) == 5
    assert fill(1.0 + LIVE_S) == 5
    assert fill(1.0 + 2 * LIVE_S) == 7
    for live in range(1, 9):
        room.note_live(live, 100.0)
    assert fill(100.0) == 1


def test_the_pause_between_two_jobs_is_not_measured() -> None:
    room, now = BatchAdmission(8), 0.0

    def begin() -> int:
        while room.has_room(8 - room.ongoing, ONLY, now):
            room.began(now)
        return room.ongoing

    for rounds in (6, 60):
        for number in range(rounds):
            running, now = begin(), now + 0.1
            for _ in range(running):
                room.ended(now, are_waiting=number < rounds - 1)
        now += 7.0
    assert begin() == 7
