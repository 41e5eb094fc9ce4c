"""Retries of a request whose replica was lost.

A request that had begun may have had side effects. It is retried only if three conditions hold: its HTTP
method is idempotent (RFC 9110, 9.2.2), or the call's option says so; its body was small enough to keep; and
no byte of the response has been sent. The caller never gets two responses.

A request that had not begun is retried regardless of its method. A channel may already have read the first
message of its body, so the retry sends that message again. A body in one message is in the sender's memory in
any case, so it is kept regardless of its size.
"""

from __future__ import annotations

from collections import deque

from daskserve.common.types import Envelope, EnvelopeKind, Message, Receive

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
#: Bodies up to this size are kept for a retry.
KEPT_BYTES = 64 * 1024
#: Maximum number of retries of a request that had begun. After the loss of a process, the backend's option
#: ``max_crash_retries`` allows fewer: the request may have ended it.
MAX_REPEATS = 3


class Replay:
    """Relays the body of a request to each replica that gets the request in turn; calls have no body."""

    def __init__(self, envelope: Envelope, receive: Receive) -> None:
        self._envelope = envelope
        self._receive = receive
        self._kept: list[Message] = []
        self._kept_bytes = 0
        self._is_whole = False
        self._ahead: deque[Message] = deque()
        self._repeats = 0
        #: The first message if `peek` has read it and no replica has received it.
        self._peeked: Message | None = None

    async def receive(self) -> Message:
        """Return the next message to replay, or the caller's next message if none is left to replay."""
        if self._ahead:
            return self._ahead.popleft()
        message, self._peeked = self._peeked or await self._receive(), None
        if self._envelope.has_started():
            self._kept.clear()  # no retry is possible any more, and a WebSocket may stay open for days
        elif self._kept_bytes <= KEPT_BYTES:
            self._kept_bytes += len(message.get("body", b""))
            self._is_whole = not (self._kept or message.get("more_body", False))
            self._kept.append(message)
            if self._kept_bytes > KEPT_BYTES and not self._is_whole:
                self._kept.clear()
        return message

    async def peek(self) -> bytes:
        """Return the first part of the body; `receive` returns it again."""
        if self._peeked is None:
            self._peeked = await self._receive()
        body: bytes = self._peeked.get("body", b"")
        return body

    def rewind(self, *, begun: bool) -> bool:
        """Prepare the request for another replica; return False if it must not, or cannot, be sent again.

        Parameters
        ----------
        begun : bool
            Whether user code may have seen the request. If not, only messages read ahead are replayed.
        """
        if self._envelope.has_started() or (self._kept_bytes > KEPT_BYTES and (begun or not self._is_whole)):
            return False
        if begun:
            if not _may_run_twice(self._envelope) or self._repeats >= MAX_REPEATS:
                return False
            self._repeats += 1
        self._ahead = deque(self._kept)
        return True


def _may_run_twice(envelope: Envelope) -> bool:
    if envelope.kind is EnvelopeKind.HTTP:
        return envelope.head.get("method") in IDEMPOTENT_METHODS
    return envelope.is_idempotent_call()
