"""The state machine of a request: the allowed events, the counts, and the release of the slot."""

from __future__ import annotations

import contextvars
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.common.types import Envelope, EnvelopeKind, Load, Message
from daskserve.data.replica.execution.runner import CodeRun
from daskserve.data.replica.requests import states
from daskserve.data.replica.requests.replica_request import InvalidRequestTransition, ReplicaRequest
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.requests.states import (
    CANCELLED,
    DONE,
    OPEN_STATES,
    TRANSITIONS,
    WAITING,
    RequestEvent,
    RequestState,
)
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.errors import ActorLostError
from daskserve.telemetry.replica import ReplicaMetrics


class ScriptedRun(CodeRun):
    """Code that the test ends."""

    def __init__(self, listener: Any, *, ends_when_cancelled: bool = False) -> None:
        super().__init__(set(), print, (), contextvars.copy_context(), listener)
        self.stops = 0
        self._ends_when_cancelled = ends_when_cancelled

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self._end(value, error)

    def _stop(self) -> None:
        self.stops += 1
        if self._ends_when_cancelled:
            self._end(None, None)


class ScriptedRequest(ReplicaRequest):
    """A request whose user code is a `ScriptedRun`."""

    def __init__(self, deadline: float | None = None, **options: Any) -> None:
        metrics = ReplicaMetrics()
        slots = Slots("b#AAAAAA", 1, metrics)
        slots.is_open = True
        super().__init__(Envelope(EnvelopeKind.CALL, {}, deadline=deadline), slots, metrics)
        self.options = options
        self.code: ScriptedRun
        #: End all runs that hold the slot besides user code.
        self.releases: list[Callable[[], None]] = []

    def begin(self, receive: Any = None, send: Any = None) -> None:
        self.run = self.code = ScriptedRun(self, **self.options)

    def resume(self, unfinished: Unfinished) -> None:
        self.begin()

    def message(self, value: Any) -> Message | None:
        return {"type": "call.result", "payload": value}

    def needs_task(self) -> bool:
        return False

    def run_code(self) -> ScriptedRun:
        """Begin with a slot."""
        self.slots.ongoing += 1
        self.granted()
        self.begin()
        return self.code

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """The numbers of handled, failed, cancelled and late requests, and of observed durations."""
        metrics = self.metrics
        return (
            metrics.handled,
            metrics.failed,
            metrics.cancelled,
            metrics.timed_out,
            metrics.latency.count,
        )


# ---- the table


def test_the_table_in_the_documentation_is_the_table_that_holds() -> None:
    lines = (states.__doc__ or "").splitlines()
    rows = [re.split(r"  +", line)[:3] for line in lines if re.match(r"[A-Z]+  ", line)]
    documented = {
        (state.lower(), event.lower()): after.lower()
        for state, events, after in rows
        for event in events.split(", ")
    }
    assert documented == dict(TRANSITIONS)


def test_every_state_but_done_has_a_way_out_and_done_has_none() -> None:
    assert {state for state, _ in TRANSITIONS} == set(get_args(RequestState)) - {DONE}
    assert set(TRANSITIONS.values()) == set(get_args(RequestState)) - {WAITING}
    assert {event for _, event in TRANSITIONS} == set(get_args(RequestEvent))


def test_an_event_moves_as_the_table_says_or_raises() -> None:
    for state, event in itertools.product(get_args(RequestState), get_args(RequestEvent)):
        answer = ScriptedRequest()
        answer.state = state
        after = TRANSITIONS.get((state, event))
        if after is not None:
            answer._move(event)
            assert answer.state == after, (state, event)
        else:
            with pytest.raises(InvalidRequestTransition, match=f"{state}.*{event!r}"):
                answer._move(event)
            assert answer.state == state, event


def test_an_invalid_event_names_the_state_of_the_answer() -> None:
    answer = ScriptedRequest()
    answer.run_code()
    answer.partial()
    answer.leave()
    expected = "<ScriptedRequest cancelled> cannot take the event 'granted'"
    with pytest.raises(InvalidRequestTransition, match=re.escape(expected)) as caught:
        answer.granted()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# ---- what is counted, and when the slot is free


@pytest.mark.parametrize(("now", "late"), [(None, 0), (6.9, 0), (7.0, 1)])
def test_a_caller_that_leaves_cancels_the_code_once_and_the_slot_waits_for_its_end(
    now: float | None, late: int
) -> None:
    answer = ScriptedRequest(deadline=7.0)
    code = answer.run_code()
    for _ in range(2):
        answer.leave(now)
        answer.fail()
        answer.run_aborted(ActorLostError("stopped"))
    assert (answer.state, code.stops, answer.slots.load()) == (CANCELLED, 1, Load(1, 0))
    code.end("too late for anybody")
    assert (answer.state, answer.slots.load(), answer.counts) == (DONE, Load(0, 0), (1, 0, 1, late, 1))


def test_code_that_ends_at_once_when_cancelled_gives_the_slot_back_once() -> None:
    answer = ScriptedRequest(ends_when_cancelled=True)
    answer.run_code()
    answer.leave()
    assert (answer.state, answer.slots.ongoing) == (DONE, 0)


def test_a_batch_holds_the_slots_of_its_requests_until_it_has_ended() -> None:
    answer = ScriptedRequest()
    answer.slots.ongoing += 1
    answer.granted()
    release = answer.hold()
    answer.leave()
    assert (answer.state, answer.slots.ongoing) == (CANCELLED, 1)
    release()
    assert (answer.state, answer.slots.ongoing) == (DONE, 0)


def test_a_request_that_left_before_its_batch_ran_gives_its_slot_back_once() -> None:
    answer = ScriptedRequest()
    answer.slots.ongoing += 1
    answer.granted()
    answer.leave()
    answer.hold()()
    assert (answer.state, answer.slots.ongoing) == (DONE, 0)


@pytest.mark.parametrize("end", ["leave", "fail"])
def test_a_request_without_a_slot_counts_nothing_and_frees_nothing(end: str) -> None:
    answer = ScriptedRequest()
    answer.slots.ongoing = 1  # of another request
    getattr(answer, end)()
    assert (answer.state, answer.slots.ongoing, answer.counts) == (DONE, 1, (0, 0, 0, 0, 0))


EVENTS: dict[str, Callable[[ScriptedRequest], None]] = {
    "partial": lambda answer: answer.partial(),
    "value": lambda answer: answer.code.end("value"),
    "error": lambda answer: answer.code.end(None, KeyError("k")),
    "abort": lambda answer: answer.code.abort(ActorLostError("stopped")),
    "leave": lambda answer: answer.leave(),
    "fail": lambda answer: answer.fail(),
    "hold": lambda answer: answer.releases.append(answer.hold()),
    "unhold": lambda answer: answer.releases.pop()() if answer.holds else None,
}


@given(st.lists(st.sampled_from(sorted(EVENTS))), st.booleans())
def test_any_sequence_of_events_frees_the_slot_once_and_counts_the_request_once(
    names: list[str], ends_when_cancelled: bool
) -> None:
    answer = ScriptedRequest(ends_when_cancelled=ends_when_cancelled)
    code = answer.run_code()
    for name in names:
        EVENTS[name](answer)
        # The slot is held as long as the caller waits or user code runs.
        assert answer.slots.ongoing == (answer.state != DONE)
        assert code.stops <= 1
        if answer.state == CANCELLED:
            assert answer.holds or not code.is_ended
    code.end()
    for release in answer.releases:
        release()
    if answer.state in OPEN_STATES:
        answer.answered()
    assert (answer.state, answer.slots.ongoing) == (DONE, 0)
    handled, failed, cancelled, _, observed = answer.counts
    assert (handled, observed) == (1, 1)
    assert failed + cancelled <= 1


# ---- both ways to the caller
