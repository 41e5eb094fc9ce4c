"""Sending a request once more after its replica was lost.

A request that had begun may have had effects, so it is repeated only if repeating is harmless: an HTTP
method that is idempotent by its definition (RFC 9110, 9.2.2), a body small enough to have been kept, and
not a byte of response sent yet. Never two answers.

One that had not begun is sent on whatever its method; but a channel may have read its body's first message
ahead, so that has to be given again too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable

from daskserve.types import Envelope, Message, Receive, Send

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
#: Bodies up to this size are kept for a repetition.
KEPT_BYTES = 64 * 1024
#: A request that loses this many replicas may well be what kills them.
MAX_REPEATS = 3


class Replay:
    """Stands between the caller of an HTTP request and the replicas that it is sent to, one by one."""

    def __init__(self, envelope: Envelope, receive: Receive, send: Send) -> None:
        self._envelope = envelope
        self._receive = receive
        self._send = send

    # Most requests never change any of these, and one is made for each.
    #: Whether the caller has got something of the response.
    is_started = False
    _kept: list[Message] | None = None
    _kept_bytes = 0
    _ahead: deque[Message] | None = None
    _repeats = 0

    async def receive(self) -> Message:
        """Return the caller's next message, or what the replica before was given already."""
        if self._ahead:
            return self._ahead.popleft()
        message = await self._receive()
        if not self.is_started and self._kept_bytes <= KEPT_BYTES:
            self._kept_bytes += len(message.get("body", b""))
            if self._kept is None:
                self._kept = []
            self._kept.append(message)
            if self._kept_bytes > KEPT_BYTES:
                self._kept.clear()
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Hand a message on to the caller."""
        if not self.is_started:
            self.is_started = True
            self._kept = None  # of no use any more, and a WebSocket may go on for days
        return self._send(message)

    def rewind(self, *, begun: bool) -> bool:
        """Get ready for another replica; False if the request must not, or cannot, be sent again.

        Parameters
        ----------
        begun : bool
            Whether user code may have seen the request. If not, only what was read ahead must be given again.
        """
        if self.is_started or self._kept_bytes > KEPT_BYTES:
            return False
        if begun:
            is_idempotent = self._envelope.head.get("method") in IDEMPOTENT_METHODS
            if not is_idempotent or self._repeats >= MAX_REPEATS:
                return False
            self._repeats += 1
        self._ahead = deque(self._kept or ())
        return True
