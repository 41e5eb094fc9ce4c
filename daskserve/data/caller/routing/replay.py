"""Retries of a request whose replica was lost.

A request that had begun may have had side effects. It is retried only if three conditions hold: its HTTP
method is idempotent (RFC 9110, 9.2.2), its body was small enough to keep, and no byte of the response has
been sent. The caller never gets two responses.

A request that had not begun is retried whatever its method. A channel may already have read the first message
of its body, so the retry sends that message again. A body that comes as one message is held by its sender
anyway, so it is kept whatever its size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable

from daskserve.common.types import Envelope, Message, Receive, Send

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
#: Bodies up to this size are kept for a retry.
KEPT_BYTES = 64 * 1024
#: Maximum number of retries of a request that had begun. After the loss of a process, the backend's option
#: ``max_crash_retries`` allows fewer: the request may be what ended it.
MAX_REPEATS = 3


class Replay:
    """Relays messages between an HTTP caller and the replicas that its request is sent to in turn."""

    def __init__(self, envelope: Envelope, receive: Receive, send: Send) -> None:
        self._envelope = envelope
        self._receive = receive
        self._send = send

    # Class attributes, because most requests never change them and each request creates a `Replay`.
    #: Whether the caller has received a part of the response.
    is_started = False
    _kept: list[Message] | None = None
    _kept_bytes = 0
    _is_whole = False
    _ahead: deque[Message] | None = None
    _repeats = 0

    async def receive(self) -> Message:
        """Return the next message to replay, or the caller's next message if none is left to replay."""
        if self._ahead:
            return self._ahead.popleft()
        message = await self._receive()
        if not self.is_started and self._kept_bytes <= KEPT_BYTES:
            self._kept_bytes += len(message.get("body", b""))
            if self._kept is None:
                self._kept = []
            self._is_whole = not (self._kept or message.get("more_body", False))
            self._kept.append(message)
            if self._kept_bytes > KEPT_BYTES and not self._is_whole:
                self._kept.clear()
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the caller."""
        if not self.is_started:
            self.is_started = True
            self._kept = None  # a retry is no longer possible, and a WebSocket may last for days
        return self._send(message)

    def rewind(self, *, begun: bool) -> bool:
        """Prepare the request for another replica; return False if it must not, or cannot, be sent again.

        Parameters
        ----------
        begun : bool
            Whether user code may have seen the request. If not, only messages read ahead are replayed.
        """
        if self.is_started or (self._kept_bytes > KEPT_BYTES and (begun or not self._is_whole)):
            return False
        if begun:
            is_idempotent = self._envelope.head.get("method") in IDEMPOTENT_METHODS
            if not is_idempotent or self._repeats >= MAX_REPEATS:
                return False
            self._repeats += 1
        self._ahead = deque(self._kept or ())
        return True
