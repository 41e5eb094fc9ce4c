"""Frames to be sent: those posted in one iteration of the event loop are sent together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

Frames = Sequence[Any]
#: Called with a frame that cannot be sent, and the reason.
Refuser = Callable[[Any, Exception], None]

#: Frames with this much work are sent at once, so that the other side can start on them. A call by handle, or
#: its answer, is half as much work as most other frames.
MAX_WORK = 32
CALL_WORK, FRAME_WORK = 1, 2


class Outbox:
    """The sending half of a `daskserve.cluster.channel.wire.transport.Transport` whose sends do not wait."""

    def __init__(self) -> None:
        self.turn = 0
        #: Whether the connection has ended, so that nothing more is sent.
        self.is_closed = False
        #: Set by `Transport.run`, before anything is sent.
        self._refuse: Refuser | None = None
        self._outbox: list[Any] = []
        self._work = 0
        self._is_flushing = False

    @property
    def unsent(self) -> Frames:
        return self._outbox

    def post(self, frame: Any, work: int = FRAME_WORK) -> None:
        self._outbox.append(frame)
        self._work += work
        if self._work >= MAX_WORK:
            self.flush()
        elif not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def flush(self) -> None:
        if not self._outbox or not self._can_send():
            return
        frames, self._outbox = self._outbox, []
        self._work = 0
        self.turn += 1
        try:
            self._send(frames)
        except (TypeError, ValueError, OverflowError):
            self._send_one_by_one(frames)

    def _flush_turn(self) -> None:
        self._is_flushing = False
        self.flush()

    def _send_one_by_one(self, frames: list[Any]) -> None:
        # A frame that cannot be packed must not prevent sending the others.
        assert self._refuse is not None
        for frame in frames:
            try:
                self._send([frame])
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(frame, error)

    def _can_send(self) -> bool:
        """Return whether frames can be sent now; otherwise they stay in the outbox."""
        raise NotImplementedError

    def _send(self, frames: list[Any]) -> None:
        """Pack frames into one message and send it.

        Raises
        ------
        TypeError, ValueError, OverflowError
            A frame cannot be packed; nothing was sent.
        """
        raise NotImplementedError
