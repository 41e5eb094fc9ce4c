"""A request's place in line at a replica that is full, as its router sees it; see
`daskserve.data.replica.slots`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from daskserve.clock import Clock, stopwatch
from daskserve.data.caller.roster import ReplicaEntry, Roster
from daskserve.figures.histogram import LatencyHistogram
from daskserve.types import DONE, SLOT_TAKEN, Load, Message, Patience, Send

#: How long a request waits in line at a replica before it looks for another one: within the longer time it
#: has been at all of them, unless they are so many that it would wait nowhere any more.
PATIENCE_S = 0.5
LEAST_PATIENCE_S = 0.025


class Place:
    """One request in line, from when it is sent until it has its slot or is sent back.

    Parameters
    ----------
    waits
        Takes how long that was.
    on_slot : callable
        Called when the request has its slot, and the next one may be sent.
    """

    def __init__(
        self,
        roster: Roster,
        replica: ReplicaEntry,
        clock: Clock,
        send: Send,
        waits: LatencyHistogram,
        on_slot: Callable[[], None],
    ) -> None:
        self._roster = roster
        self._replica = replica
        self._clock = clock
        self._send = send
        self._waits = waits
        self._on_slot = on_slot
        self._began = stopwatch()
        self._is_left = False

    def patience(self, since: float) -> Patience:
        """Return for how long a request may wait here that has been in lines since then."""
        left_s = max(PATIENCE_S / max(self._roster.size, 1), LEAST_PATIENCE_S)
        return Patience(left_s, self._clock.now() - since)

    def send(self, message: Message) -> Awaitable[None]:
        """Hand a message on to the caller, unless it is for the router: that the request has its slot."""
        if message["type"] != SLOT_TAKEN:
            return self._send(message)
        self._roster.report(self._replica, Load(message["ongoing"], message["queued"]), self._clock.now())
        self.leave()
        self._on_slot()
        return DONE

    def leave(self) -> None:
        """Let the next one have the place, if that has not happened yet."""
        if not self._is_left:
            self._is_left = True
            self._roster.leave_line(self._replica)
            self._waits.observe(stopwatch() - self._began)
