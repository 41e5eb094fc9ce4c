"""The history that a controller writes with each of its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from daskserve.cluster.protocols.base import EPOCH_BITS
from daskserve.common.clock import Clock
from daskserve.common.formatting import capitalized
from daskserve.common.types import BackendTag
from daskserve.control.decisions.history.events import as_row, events_of
from daskserve.control.decisions.history.revisions import revised
from daskserve.control.records.events import Event, EventKind
from daskserve.control.records.records import Change
from daskserve.control.records.state import State

logger = logging.getLogger("daskserve.controller")


class HistoryRecorder:
    """Derives revisions and events from changes."""

    def __init__(self, state: State, clock: Clock, epoch: int, budget_bytes: float) -> None:
        self._state = state
        self._clock = clock
        #: The numbers of this controller's events are higher than those of earlier ones.
        self._first = (epoch << EPOCH_BITS) + 1
        self._epoch = epoch
        self._budget_bytes = budget_bytes
        #: Set, and replaced, when there are new events.
        self.added = asyncio.Event()

    def note_added(self) -> None:
        """Wake the calls that wait for events."""
        added, self.added = self.added, asyncio.Event()
        added.set()

    def accompany(self, change: Change, causes: Mapping[str, str]) -> Change:
        """Return the history rows to write together with a change."""
        wall = self._clock.wall()
        try:
            more = revised(self._state, change, wall, self._budget_bytes)
            more |= events_of(self._state, change | more, causes, wall=wall, number=self._first)
        except Exception:
            # A bug in the history must not block the change.
            logger.exception("The history of a change could not be written: %s", ", ".join(sorted(change)))
            return {}
        return more

    def of_start(self, worker: str) -> Change:
        """Return the event of this controller's start, as a record."""
        what = "starts the instance" if self._epoch == 1 else "takes over"
        text = f"Controller {self._epoch} {what} on worker {worker}"
        event = Event(EventKind.CONTROLLER_STARTED, text)
        return as_row(self._state, [event], wall=self._clock.wall(), number=self._first)

    def of_routers(self, errors: Mapping[BackendTag, str]) -> Change:
        """Return the row of events about errors of the request routers of some backends."""
        events = []
        for tag, text in errors.items():
            if (backend := self._state.backends.get(tag)) is not None:
                message = f"{capitalized(backend.display_name)}: {text}"
                events.append(Event(EventKind.ROUTER_FAILED, message, backend.application, tag))
        return as_row(self._state, events, wall=self._clock.wall(), number=self._first)
