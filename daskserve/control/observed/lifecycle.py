"""The life cycle of a replica, as a table of transitions.

::

    SHOULD_START --placed--> STARTING --started--> RUNNING
         |                    |   |                  |
         |withdrawn     failed|   |unwanted          |unwanted
         v                    v   v                  v
      STOPPED <---------- STOPPED  SHOULD_STOP --sent--> STOPPING --gone--> STOPPED

A lost worker takes a replica to STOPPED from every state. STOPPED is not kept: the record is removed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import ReplicaState as S
from daskserve.control.records.records import ReplicaRecord
from daskserve.errors import ServeError


class ReplicaEvent(enum.StrEnum):
    """The events of a replica."""

    PLACED = "placed"
    WITHDRAWN = "withdrawn"
    STARTED = "started"
    FAILED = "failed"
    UNWANTED = "unwanted"
    STOP_SENT = "stop sent"
    GONE = "gone"
    LOST = "lost"


E = ReplicaEvent

TRANSITIONS: Mapping[tuple[S, ReplicaEvent], S] = {
    (S.SHOULD_START, E.PLACED): S.STARTING,
    (S.SHOULD_START, E.WITHDRAWN): S.STOPPED,
    (S.STARTING, E.STARTED): S.RUNNING,
    (S.STARTING, E.FAILED): S.STOPPED,
    (S.STARTING, E.UNWANTED): S.SHOULD_STOP,
    (S.STARTING, E.LOST): S.STOPPED,
    (S.RUNNING, E.FAILED): S.STOPPED,
    (S.RUNNING, E.UNWANTED): S.SHOULD_STOP,
    (S.RUNNING, E.LOST): S.STOPPED,
    (S.SHOULD_STOP, E.STOP_SENT): S.STOPPING,
    (S.SHOULD_STOP, E.LOST): S.STOPPED,
    (S.STOPPING, E.GONE): S.STOPPED,
    (S.STOPPING, E.LOST): S.STOPPED,
}

#: States in which a replica counts towards the target number.
WANTED_STATES = frozenset({S.SHOULD_START, S.STARTING, S.RUNNING})
#: The wanted states in which a replica has a worker.
PLACED_STATES = frozenset({S.STARTING, S.RUNNING})
#: The order in which replicas are removed when there are too many.
STOP_ORDER = (S.SHOULD_START, S.STARTING, S.RUNNING)


class InvalidTransition(ServeError):
    """An event that is not allowed in the replica's state: a bug in the control plane."""


def move(replica: ReplicaRecord, event: ReplicaEvent, **changes: Any) -> ReplicaRecord | None:
    """Return the replica after an event; None once it is STOPPED, which is not recorded."""
    state = TRANSITIONS.get((replica.state, event))
    if state is None:
        history = ", ".join(replica.events) or "none"
        raise InvalidTransition(
            f"Replica {replica.tag} is {replica.state}; {event!s} is not valid in that state. "
            f"Its events so far: {history}."
        )
    if state is S.STOPPED:
        return None
    return replace(replica, state=state, events=(*replica.events, event.value), **changes)
