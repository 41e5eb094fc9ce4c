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

from daskserve.types import Envelope, EnvelopeKind, Message, Receive, Send

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
#: Bodies up to this size are kept for a repetition.
KEPT_BYTES = 64 * 1024
#: A request that loses this many replicas may well be what kills them.
MAX_REPEATS = 3


class Replay:
    """Stands between a caller and the replicas that its request is sent to, one after the other."""

    __slots__ = (
        "_ahead",
        "_is_idempotent",
        "_kept",
        "_kept_bytes",
        "_receive",
        "_repeats",
        "_send",
        "is_started",
    )

    def __init__(self, receive: Receive, send: Send, *, is_idempotent: bool) -> None:
        self._receive = receive
        self._send = send
        self._is_idempotent = is_idempotent
        self._kept: list[Message] | None = []
        self._kept_bytes = 0
        self._ahead: deque[Message] = deque()
        self._repeats = 0
        #: Whether the caller has got something of the response.
        self.is_started = False

    async def receive(self) -> Message:
        """Return the caller's next message, or what the replica before was given already."""
        if self._ahead:
            return self._ahead.popleft()
        message = await self._receive()
        if self._kept is not None:
            self._kept_bytes += len(message.get("body", b""))
            if self._kept_bytes > KEPT_BYTES:
                self._kept = None
            else:
                self._kept.append(message)
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
        if self.is_started or self._kept is None:
            return False
        if begun:
            if not self._is_idempotent or self._repeats >= MAX_REPEATS:
                return False
            self._repeats += 1
        self._ahead = deque(self._kept)
        return True


def replay_of(envelope: Envelope, receive: Receive, send: Send) -> Replay | None:
    """Return what an HTTP request is to be sent through; None for calls, which have no messages to repeat."""
    if envelope.kind is not EnvelopeKind.HTTP:
        return None
    return Replay(receive, send, is_idempotent=envelope.head.get("method") in IDEMPOTENT_METHODS)
