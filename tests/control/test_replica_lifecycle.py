"""The life of a replica: every state with every event."""

from __future__ import annotations

import itertools

import pytest
from control_harness import replica

from daskserve.common.types import ReplicaState
from daskserve.control.observed.lifecycle import (
    STOP_ORDER,
    TRANSITIONS,
    WANTED_STATES,
    InvalidTransition,
    ReplicaEvent,
    move,
)

# The transitions are repeated here, as the design states them, to find mistakes in the table.
ALLOWED = {
    "SHOULD_START": {"placed": "STARTING", "withdrawn": "STOPPED"},
    "STARTING": {"started": "RUNNING", "failed": "STOPPED", "unwanted": "SHOULD_STOP", "lost": "STOPPED"},
    "RUNNING": {"failed": "STOPPED", "unwanted": "SHOULD_STOP", "lost": "STOPPED"},
    "SHOULD_STOP": {"stop sent": "STOPPING", "lost": "STOPPED"},
    "STOPPING": {"gone": "STOPPED", "lost": "STOPPED"},
    "STOPPED": {},
}
PAIRS = list(itertools.product(ReplicaState, ReplicaEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=[f"{state}-{event}" for state, event in PAIRS])
def test_every_state_takes_the_events_of_its_row_and_no_other(
    state: ReplicaState, event: ReplicaEvent
) -> None:
    before = replica("b#1", state)
    expected = ALLOWED[state].get(event)
    if expected is None:
        with pytest.raises(InvalidTransition, match=f"Replica b#1 is {state}; {event} is not"):
            move(before, event)
    elif expected == "STOPPED":
        assert move(before, event) is None
    else:
        after = move(before, event)
        assert after is not None
        assert after.state == expected


def test_the_table_holds_nothing_but_these_rows() -> None:
    assert {(state.value, event.value): to.value for (state, event), to in TRANSITIONS.items()} == {
        (state, event): to for state, row in ALLOWED.items() for event, to in row.items()
    }


def test_a_move_takes_other_changes_along() -> None:
    waiting = replica("b#1", ReplicaState.SHOULD_START)
    placed = move(waiting, ReplicaEvent.PLACED, worker="w2", incarnation=7, config_id="c9")
    expected = {"worker": "w2", "incarnation": 7, "config_id": "c9", "events": ("placed",)}
    assert placed == replica("b#1", ReplicaState.STARTING, **expected)
    assert waiting.worker is None


def test_only_wanted_replicas_are_in_the_stop_order() -> None:
    assert set(STOP_ORDER) == WANTED_STATES
    assert STOP_ORDER == (ReplicaState.SHOULD_START, ReplicaState.STARTING, ReplicaState.RUNNING)


def test_an_invalid_transition_names_the_events_before_it() -> None:
    starting = move(replica("b#1", ReplicaState.SHOULD_START), ReplicaEvent.PLACED, worker="w1")
    assert starting is not None
    running = move(starting, ReplicaEvent.STARTED)
    assert running is not None
    with pytest.raises(InvalidTransition, match=r"b#1 is RUNNING; gone is not .* so far: placed, started\."):
        move(running, ReplicaEvent.GONE)
