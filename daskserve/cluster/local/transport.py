"""Connections between simulated processes of a local cluster: two ends in one event loop, without a socket.

A `daskserve.cluster.channel.channel.Channel` runs over each end, so requests between simulated processes use
the same code as between real ones. Messages are packed and unpacked, arrive in order, and are delayed by the
cluster's latency. A suspended process neither sends nor receives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from daskserve.cluster.channel.wire.frames import Buffer, unpack
from daskserve.cluster.channel.wire.segments import Segments
from daskserve.cluster.channel.wire.transport import Outbox, Receiver, Refuser, Traffic

logger = logging.getLogger("daskserve.local")

#: Calls a function with a value: immediately if its process runs; if it is suspended, when it resumes.
WhenAwake: TypeAlias = Callable[[Callable[[Any], None], Any], None]


class MemoryTransport(Outbox):
    """One end of a connection; see `connect`."""

    sock = None
    _peer: MemoryTransport

    def __init__(self, peer_address: str, delay_s: Callable[[], float], when_awake: WhenAwake) -> None:
        super().__init__()
        self.is_relayed = False
        self.peer_address = peer_address
        self.traffic = Traffic()
        self._delay_s = delay_s
        self._when_awake = when_awake
        self._is_aborted = False
        #: Messages on their way to the other end; None marks the end of the connection.
        self._underway: deque[Sequence[Buffer] | None] = deque()
        self._last_due = 0.0
        #: Messages that arrived before `run`.
        self._early: list[Sequence[Buffer] | None] = []
        self._lost: asyncio.Future[None] | None = None
        self._receive: Receiver | None = None

    def share(self, segments: Segments, *, begins: bool) -> None:
        """Do nothing: messages are copied within this process."""

    def take_note(self, note: Sequence[Any]) -> None:
        """Do nothing: the other end shares no memory."""

    async def run(self, receive: Receiver, refuse: Refuser) -> None:
        if self._is_aborted:
            return
        self._receive, self._refuse = receive, refuse
        self._lost = asyncio.get_running_loop().create_future()
        try:
            self.flush()
            early, self._early = self._early, []
            for message in early:
                self._take(message)
            await self._lost
        finally:
            self.abort()

    def abort(self) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True
        self._depart(None)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    # ---- the rest is private

    def _can_send(self) -> bool:
        # Frames posted after the other end has closed stay unsent, so their requests have not begun.
        return self._lost is not None and not self._is_aborted and not self._peer._is_aborted

    def _send(self, frames: list[Any]) -> None:
        body, large = self._packer.pack(frames)
        message = [body, *(bytearray(view) for view in large)]
        self.traffic.sent_bytes += sum(map(len, message))
        self._when_awake(self._depart, message)

    def _depart(self, message: Sequence[Buffer] | None) -> None:
        loop = asyncio.get_running_loop()
        self._last_due = max(self._last_due, loop.time() + self._delay_s())
        self._underway.append(message)
        if self._last_due > loop.time():
            loop.call_at(self._last_due, self._arrive)
        else:
            loop.call_soon(self._arrive)

    def _arrive(self) -> None:
        # Messages arrive in the order in which they were sent, whichever timer fires first.
        self._peer._when_awake(self._peer._take, self._underway.popleft())

    def _take(self, message: Sequence[Buffer] | None) -> None:
        if self._is_aborted:
            return
        if self._receive is None:
            self._early.append(message)
        elif message is None:
            self.abort()
        else:
            self.traffic.received_bytes += sum(map(len, message))
            try:
                self._receive(unpack(message))
            except Exception:
                logger.exception("%s sent an invalid frame; the connection is closed", self.peer_address)
                self.abort()


def connect(
    here: tuple[str, WhenAwake], there: tuple[str, WhenAwake], delay_s: Callable[[], float]
) -> tuple[MemoryTransport, MemoryTransport]:
    """Return both ends of a connection between two processes, each given by address and `WhenAwake`."""
    ours = MemoryTransport(there[0], delay_s, here[1])
    theirs = MemoryTransport(here[0], delay_s, there[1])
    ours._peer, theirs._peer = theirs, ours
    return ours, theirs
