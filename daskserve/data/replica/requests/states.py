"""The states of a request at its replica, and the events that change them.

============  ====================  ============  ========================================================
state         event                 next state    what happened
============  ====================  ============  ========================================================
WAITING       GRANTED               RUNNING       the request got a slot: from here on it counts as begun
WAITING       REFUSED               DONE          there was no slot in time, or the replica stopped
WAITING       LEFT, LATE            DONE          the caller did not wait for a slot
RUNNING       PARTIAL               STREAMING     user code sent a message, or needs another step
RUNNING       ANSWERED              DONE          the caller has the whole answer
RUNNING       FAILED                DONE          user code has ended with an error, which the caller has
RUNNING       ABORTED               CANCELLED     the answer failed, but user code has not ended yet
RUNNING       LEFT                  CANCELLED     the caller left
RUNNING       LATE                  CANCELLED     the deadline passed
STREAMING     PARTIAL               STREAMING     the next message or step
STREAMING     ANSWERED, FAILED      DONE          as in RUNNING
STREAMING     ABORTED, LEFT, LATE   CANCELLED     as in RUNNING
CANCELLED     ENDED                 DONE          user code has ended
============  ====================  ============  ========================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

# Plain strings are faster to compare than members of an enum; each request compares several.
RequestState: TypeAlias = Literal["waiting", "running", "streaming", "cancelled", "done"]
WAITING: Final = "waiting"
RUNNING: Final = "running"
STREAMING: Final = "streaming"
CANCELLED: Final = "cancelled"
DONE: Final = "done"

RequestEvent: TypeAlias = Literal[
    "granted", "refused", "partial", "answered", "failed", "aborted", "left", "late", "ended"
]
GRANTED: Final = "granted"
REFUSED: Final = "refused"
PARTIAL: Final = "partial"
ANSWERED: Final = "answered"
FAILED: Final = "failed"
ABORTED: Final = "aborted"
LEFT: Final = "left"
LATE: Final = "late"
ENDED: Final = "ended"

TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = {
    (WAITING, GRANTED): RUNNING,
    (WAITING, REFUSED): DONE,
    (WAITING, LEFT): DONE,
    (WAITING, LATE): DONE,
    (RUNNING, PARTIAL): STREAMING,
    (RUNNING, ANSWERED): DONE,
    (RUNNING, FAILED): DONE,
    (RUNNING, ABORTED): CANCELLED,
    (RUNNING, LEFT): CANCELLED,
    (RUNNING, LATE): CANCELLED,
    (STREAMING, PARTIAL): STREAMING,
    (STREAMING, ANSWERED): DONE,
    (STREAMING, FAILED): DONE,
    (STREAMING, ABORTED): CANCELLED,
    (STREAMING, LEFT): CANCELLED,
    (STREAMING, LATE): CANCELLED,
    (CANCELLED, ENDED): DONE,
}
# The same table by state, because two lookups by a string are faster than one by a tuple.
NEXT: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    state: {event: after for (before, event), after in TRANSITIONS.items() if before == state}
    for state in get_args(RequestState)
}
GRANTED_STATE = TRANSITIONS[WAITING, GRANTED]
ANSWERED_STATE = TRANSITIONS[RUNNING, ANSWERED]
#: States in which the caller waits for the answer.
OPEN_STATES = frozenset({RUNNING, STREAMING})
