"""Goals: requested changes that are not complete yet."""

from __future__ import annotations

import itertools
from dataclasses import replace

from control_harness import app_spec, backend, goal, state_of
from tables import each_case

from daskserve.control.decisions import applications
from daskserve.control.decisions.goals import KEPT_GOALS, SWEEP_AT, ChangeLimits, ended, finish, open_goal
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    Change,
    GoalRecord,
    GoalState,
)
from daskserve.control.records.state import State
from daskserve.control.records.storing.encoding import from_plain
from daskserve.errors import DeletedError, NoCapacityError, SupersededError
from daskserve.payload.packed_errors import load_error


def opened(
    state: State, wanted: BackendRecord | None = None, *, goal_id: str = "new"
) -> tuple[Change, GoalRecord]:
    change: Change = {}
    open_goal(state, change, wanted or backend(), goal_id=goal_id, limits=ChangeLimits(timeout_s=5.0))
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
    """A caller that waits for the older goal must not wait for ever."""
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
    """A controller skips a damaged record when it starts; the goal's backend must still accept changes."""
    change, found = opened(state_of(backend(goal="lost")))
    assert set(change) == {"goal/new", "backend/b"}
    assert found.state is GoalState.PENDING


def test_numbers_grow() -> None:
    state = state_of(goal("a", number=4, backend="x"), goal("b", number=9, backend="y"))
    assert opened(state)[1].number == 10


def finished(count: int) -> State:
    return state_of(*(goal(f"g{n}", number=n, backend="x", state=GoalState.DONE) for n in range(count)))


@each_case(
    ("finished_count", "swept_count"),
    [(KEPT_GOALS, 0), (SWEEP_AT, 0), (SWEEP_AT + 1, SWEEP_AT + 1 - KEPT_GOALS)],
)
def test_the_oldest_finished_goals_are_dropped_by_the_hundred(finished_count: int, swept_count: int) -> None:
    change, _ = opened(finished(finished_count))
    swept = {key for key, record in change.items() if record is None}
    assert swept == {f"goal/g{n}" for n in range(swept_count)}


def test_a_deploy_of_several_applications_drops_the_oldest_goals_once() -> None:
    state = finished(SWEEP_AT + 1)
    numbers = itertools.count()
    deployed = applications.deploy(
        state,
        [app_spec("one", route="/one"), app_spec("two", route="/two")],
        new_goal=lambda: f"new{next(numbers)}",
        now=0.0,
    )
    swept = {key for key, record in deployed.change.items() if record is None}
    assert swept == {f"goal/g{n}" for n in range(SWEEP_AT + 1 - KEPT_GOALS)}


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


def replaced_by(state: State, *wanted: BackendRecord | AppRecord) -> GoalRecord:
    """Return the goal ``old`` after a program has changed its backend or application."""
    change: Change = {}
    open_goal(state, change, *wanted, goal_id="new", limits=ChangeLimits(timeout_s=5.0), by="b.py")
    found = change["goal/old"]
    assert isinstance(found, GoalRecord)
    assert (found.state, found.successor) == (GoalState.DONE, "new")
    return found


def test_a_superseded_goal_says_by_whom_and_which_version() -> None:
    state = state_of(backend(goal="old"), goal("old"))
    error = load_error(replaced_by(state, backend(version="v2", user_version="2")).error or b"")
    assert isinstance(error, SupersededError)
    assert (error.by, error.version, error.goal) == ("b.py", "2", "new")
    assert str(error) == (
        "Backend 'b' was changed by b.py before this change was complete: version '2' of backend 'b' is "
        "deployed instead."
    )


def test_a_goal_whose_backend_is_deleted_says_by_whom() -> None:
    state = state_of(backend(goal="old"), goal("old"))
    error = load_error(replaced_by(state, backend(is_deleting=True)).error or b"")
    assert isinstance(error, DeletedError)
    assert error.by == "b.py"
    assert str(error) == "Backend 'b' was deleted by b.py before this change was complete."


def test_only_a_pending_goal_of_a_backend_ends_with_that_of_its_application() -> None:
    mine = backend(goal="own")
    assert set(ended(state_of(mine, goal("own")), mine, "apps", None)) == {"goal/own"}
    assert ended(state_of(mine, finish(goal("own"))), mine, "apps", None) == {}


def test_a_deletion_that_is_hurried_on_has_no_error() -> None:
    state = state_of(backend(goal="old", is_deleting=True), goal("old"))
    assert replaced_by(state, backend(is_deleting=True, is_forced=True)).error is None


def test_a_deletion_that_a_deploy_takes_back_is_superseded() -> None:
    state = state_of(backend(goal="old", is_deleting=True), goal("old"))
    assert isinstance(load_error(replaced_by(state, backend()).error or b""), SupersededError)


def test_an_application_that_only_changes_its_route_names_the_version_of_its_ingress() -> None:
    app = AppRecord("a", "/old", {"i": "b"}, goal="old")
    state = state_of(app, backend(application="a", goal="old"), goal("old", backend="", application="a"))
    error = load_error(replaced_by(state, replace(app, route="/new")).error or b"")
    assert isinstance(error, SupersededError)
    assert error.version == "v1"
