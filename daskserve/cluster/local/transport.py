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

from daskserve.cluster.channel.packing import pack, unpack
from daskserve.cluster.channel.parts import Buffer
from daskserve.cluster.channel.transport import FRAME_WORK, MAX_WORK, Frames, Receiver, Refuser, Traffic

logger = logging.getLogger("daskserve.local")

#: Calls a function with a value: immediately if its process runs, on resumption if it is suspended.
WhenAwake: TypeAlias = Callable[[Callable[[Any], None], Any], None]


class MemoryTransport:
    """One end of a connection; see `connect`."""

    sock = None
    _peer: MemoryTransport

    def __init__(self, peer_address: str, delay_s: Callable[[], float], when_awake: WhenAwake) -> None:
        self.peer_address = peer_address
        self.traffic = Traffic()
        self.turn = 0
        self._delay_s = delay_s
        self._when_awake = when_awake
        self._outbox: list[Any] = []
        self._work = 0
        self._is_flushing = self._is_aborted = False
        #: Messages on their way to the other end; None marks the end of the connection.
        self._underway: deque[Sequence[Buffer] | None] = deque()
        self._last_due = 0.0
        #: Messages that arrived before `run`.
        self._early: list[Sequence[Buffer] | None] = []
        self._lost: asyncio.Future[None] | None = None
        self._receive: Receiver | None = None
        self._refuse: Refuser | None = None

    @property
    def unsent(self) -> Frames:
        return self._outbox

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

    def post(self, frame: Any, work: int = FRAME_WORK) -> None:
        self._outbox.append(frame)
        self._work += work
        if self._work >= MAX_WORK:
            self.flush()
        elif not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def flush(self) -> None:
        # Frames posted after the other end has closed stay unsent, so their requests have not begun.
        if self._lost is None or self._is_aborted or self._peer._is_aborted or not self._outbox:
            return
        frames, self._outbox = self._outbox, []
        self._work = 0
        self.turn += 1
        try:
            self._send(frames)
        except (TypeError, ValueError, OverflowError):
            self._send_one_by_one(frames)

    def abort(self) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True
        self._depart(None)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    # ---- the rest is private

    def _flush_turn(self) -> None:
        self._is_flushing = False
        self.flush()

    def _send_one_by_one(self, frames: list[Any]) -> None:
        # One frame that cannot be packed must not affect the others.
        assert self._refuse is not None
        for frame in frames:
            try:
                self._send([frame])
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(frame, error)

    def _send(self, frames: list[Any]) -> None:
        body, large = pack(frames)
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
