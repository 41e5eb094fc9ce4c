"""Receives the rest of a large body directly into its buffer, without a copy.

A transport passes received data to an ``asyncio.Protocol`` as new `bytes`, which are then copied into the
buffer of the body. An ``asyncio.BufferedProtocol`` provides the buffer into which data is received. So it
replaces the connection as the protocol of the transport while a large body is gathered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from daskserve.proxies.exchange.request.body import RequestBody

#: Minimum size of the rest of a body that is received directly.
LEAST_BYTES = 256 * 1024
#: How much is received at a time, so that other connections are served in between.
_TURN_BYTES = 1 << 20
_DROPPED_BYTES = 64 * 1024


class BufferedBodyProtocol(asyncio.BufferedProtocol):
    """The protocol of a transport while it receives a body.

    Parameters
    ----------
    left_bytes : int
        How many bytes of the body are missing.
    on_filled : callable
        Called with the number of received bytes after each read.
    """

    def __init__(
        self, reader: asyncio.Protocol, body: RequestBody, left_bytes: int, on_filled: Callable[[int], None]
    ) -> None:
        self._body = body
        self._left_bytes = left_bytes
        self._on_filled = on_filled
        self.eof_received = reader.eof_received  # type: ignore[method-assign]
        self.connection_lost = reader.connection_lost  # type: ignore[method-assign]
        self.pause_writing = reader.pause_writing  # type: ignore[method-assign]
        self.resume_writing = reader.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._body.room()
        if room is None:  # the rest is dropped
            room = memoryview(bytearray(_DROPPED_BYTES))
        return room[: min(self._left_bytes, _TURN_BYTES)]

    def buffer_updated(self, nbytes: int) -> None:
        self._left_bytes -= nbytes
        self._on_filled(nbytes)
