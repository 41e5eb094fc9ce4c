"""Adds the received messages of a WebSocket to its inbox: decompressed, within limits, in small steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wsproto.events import BytesMessage, TextMessage

from daskserve.common.clock import Clock
from daskserve.proxies.exchange.limits.limits import MESSAGE_SIZE, Limits
from daskserve.proxies.exchange.limits.loop_work import STEP_BYTES
from daskserve.proxies.exchange.websocket.deflate import Inflation, InflationError
from daskserve.proxies.exchange.websocket.inbox import WebSocketInbox


class MessageAssembler:
    """Assembles the received messages of one connection.

    Parameters
    ----------
    inflation : Inflation, optional
        Decompresses compressed messages.
    close : callable
        ``close(code, reason)`` closes the connection, which ends the inbox.
    max_message_bytes : int
        Maximum size of a message.
    """

    def __init__(
        self,
        inbox: WebSocketInbox,
        inflation: Inflation | None,
        limits: Limits,
        close: Callable[[int, str], None],
        *,
        max_message_bytes: int,
        clock: Clock,
    ) -> None:
        self._inbox = inbox
        self._inflation = inflation
        self._limits = limits
        self._close = close
        self._max_message_bytes = max_message_bytes
        self._clock = clock

    def take(self, event: TextMessage | BytesMessage) -> Iterator[int]:
        """Add a message or a part of one to the inbox; yield the cost of each step."""
        inflation = self._inflation
        if inflation is None or not inflation.applies or not isinstance(event, BytesMessage):
            self._add(event)
            yield STEP_BYTES + len(event.data)
            return
        yield STEP_BYTES
        parts = inflation.parts(event, self._clock.now())
        try:
            while self._inbox.disconnect is None and (part := next(parts, None)) is not None:
                if part.data or part.message_finished:
                    self._add(part)
                yield STEP_BYTES + len(part.data)
        except InflationError as error:
            if error.limit is not None:
                self._limits.hit(error.limit)
            self._close(error.code, error.text)

    def _add(self, event: TextMessage | BytesMessage) -> None:
        # While the WebSocket is closing, messages are dropped; the client's close may still follow.
        if self._inbox.disconnect is not None or self._inbox.add_part(event, self._max_message_bytes):
            return
        if self._inbox.is_over_budget:
            self._close(1013, "the server holds too many messages; try again later")
        else:
            self._limits.hit(MESSAGE_SIZE)
            self._close(1009, f"max_websocket_message_bytes allows {self._max_message_bytes} bytes")
