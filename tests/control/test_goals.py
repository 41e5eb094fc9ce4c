"""Goals: what was asked for and is not there yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_harness import backend, goal, state_of

from daskserve.control.goals import KEPT_GOALS, SWEEP_AT, finish, open_goal
from daskserve.control.records import BackendRecord, Change, GoalRecord, GoalState, from_plain
from daskserve.control.state import State
from daskserve.errors import NoCapacityError
from daskserve.payload.packed_errors import load_error


def opened(
    state: State, wanted: BackendRecord | None = None, *, goal_id: str = "new"
) -> tuple[Change, GoalRecord]:
    change: Change = {}
    open_goal(state, change, wanted or backend(), goal_id=goal_id, timeout_s=5.0)
    record, found = change["backend/b"], change[f"goal/{goal_id}"]
    assert isinstance(found, GoalRecord)
    assert isinstance(record, BackendRecord)
    assert record.goal == goal_id
    return change, found


def test_a_new_backend_has_no_previous_record() -> None:
    change, found = opened(State())
    assert found == GoalRecord("new", "b", GoalState.PENDING, 1, 5.0, previous={"backend/b": None})
    assert set(change) == {"goal/new", "backend/b"}


def test_a_failed_change_restores_the_previous_record() -> None:
    before = backend(num_replicas=1)
    _, found = opened(state_of(before), backend(num_replicas=5))
    assert from_plain("backend", found.previous["backend/b"] or {}) == before


def test_a_newer_goal_completes_the_older_one() -> None:
    """A caller that waits for the older spec must not wait forever."""
    state = state_of(backend(goal="old"), goal("old"))
    change, _ = opened(state)
    superseded = change["goal/old"]
    assert isinstance(superseded, GoalRecord)
    assert superseded.state is GoalState.DONE


def test_a_chain_of_changes_rolls_back_to_the_last_completed_one() -> None:
    settled = backend(num_replicas=1)
    state = state_of(settled)
    change, _ = opened(state, backend(num_replicas=2), goal_id="first")
    state.apply(change)
    change, second = opened(state, backend(num_replicas=3), goal_id="second")
    assert from_plain("backend", second.previous["backend/b"] or {}) == settled


def test_a_failed_change_of_an_uncompleted_backend_removes_it() -> None:
    state = State()
    change, _ = opened(state, goal_id="first")
    state.apply(change)
    _, second = opened(state, backend(num_replicas=3), goal_id="second")
    assert second.previous == {"backend/b": None}


def test_a_failed_recreation_does_not_restore_the_deleted_backend() -> None:
    state = state_of(backend(num_replicas=2))
    deleting = backend(num_replicas=2, is_deleting=True)
    change, first = opened(state, deleting, goal_id="delete")
    assert first.previous == {}
    state.apply(change)
    _, second = opened(state, backend("b", "v2"), goal_id="create")
    assert second.previous == {"backend/b": None}


def test_a_lost_goal_record_does_not_block_changes() -> None:
    """A controller skips a corrupt record when it starts; its backend must still be changeable."""
    change, found = opened(state_of(backend(goal="lost")))
    assert set(change) == {"goal/new", "backend/b"}
    assert found.state is GoalState.PENDING


def test_numbers_grow() -> None:
    state = state_of(goal("a", number=4, backend="x"), goal("b", number=9, backend="y"))
    assert opened(state)[1].number == 10


def finished(count: int) -> State:
    return state_of(*(goal(f"g{n}", number=n, backend="x", state=GoalState.DONE) for n in range(count)))


@pytest.mark.parametrize(
    ("finished_count", "swept_count"),
    [(KEPT_GOALS, 0), (SWEEP_AT, 0), (SWEEP_AT + 1, SWEEP_AT + 1 - KEPT_GOALS)],
)
def test_the_oldest_finished_goals_are_dropped_by_the_hundred(finished_count: int, swept_count: int) -> None:
    change, _ = opened(finished(finished_count))
    swept = {key for key, record in change.items() if record is None}
    assert swept == {f"goal/g{n}" for n in range(swept_count)}


def test_pending_goals_are_never_dropped() -> None:
    state = finished(SWEEP_AT)
    for number in range(SWEEP_AT + 5):
        pending = goal(f"p{number}", number=-number, backend=f"y{number}")
        state.apply({pending.key: pending})
    assert None not in opened(state)[0].values()


def test_a_finished_goal_has_no_previous_record() -> None:
    pending = goal(previous={"backend/b": None}, failures={"b": 2})
    assert finish(pending) == replace(pending, state=GoalState.DONE, previous={})
    failed = finish(pending, NoCapacityError("no room"))
    assert (failed.state, failed.previous) == (GoalState.FAILED, {})
    assert failed.error is not None
    error = load_error(failed.error)
    assert isinstance(error, NoCapacityError)
    assert str(error) == "no room"
