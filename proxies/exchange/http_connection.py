"""Reads the requests of one connection, without doing I/O itself.

An `HTTPConnection` is an ``asyncio.Protocol``: a transport calls it with the received bytes, and the
connection calls the transport to write, to pause and to close.

If a client sends more requests before the first one is answered (pipelining), they wait, and reading pauses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from daskserve.loops.connection_table import MovedConnection
from daskserve.proxies.exchange.exchange import LINGER_S, Exchange
from daskserve.proxies.exchange.limits.limits import LINGER
from daskserve.proxies.exchange.limits.loop_work import SLICE_BYTES, SLOW
from daskserve.proxies.exchange.request.buffered_body import LEAST_BYTES, BufferedBodyProtocol
from daskserve.proxies.exchange.request.chunks import ChunkReader
from daskserve.proxies.exchange.request.head import RefusedRequestError, RequestHead, read_head
from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import can_detect_disconnects, duplicate
from daskserve.proxies.exchange.taken_connection import RecordingProtocol, TakenConnection

log = logging.getLogger("daskserve.proxies")

#: How long a connection that leaves waits before it checks again whether its response was sent.
SENT_S = 0.05


class HTTPConnection(Connection):
    """Reads the requests of one connection.

    Parameters
    ----------
    on_made : callable
        Called once the connection is in the server state.
    moved : MovedConnection, optional
        What another process has received over the connection.
    taken : TakenConnection, optional
        Set if a proxy has given the connection to this process.
    """

    exchange: Exchange | None
    #: Whether `connection_made` was called.
    is_made = False
    #: Whether the transport takes a ``BufferedProtocol``.
    can_fill = False
    _transport: asyncio.Transport

    def __init__(
        self,
        server_state: ServerState,
        on_made: Callable[[], object],
        moved: MovedConnection | None = None,
        taken: TakenConnection | None = None,
    ) -> None:
        super().__init__(server_state)
        self._on_made = on_made
        if moved is not None:
            self.lost, self.stays = moved.lost, moved.stays
        self.taken = taken
        self._is_busy = False  # a request has not been finished
        self._is_read = True  # its request is complete
        self._left = 0  # bytes of its body that have not been read
        self._chunks: ChunkReader | None = None  # reads a chunked body
        self._room: asyncio.Future[None] | None = None  # pending while reading is paused
        self._rest = b"" if moved is None else moved.received  # unread data
        self._searched = 0  # how much of it was searched for the end of a head
        self._drops_data = False  # further data is dropped
        self._has_ended = False  # the client has ended its side of the connection
        self._linger: asyncio.TimerHandle | None = None

    # ---- called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._transport = transport
        self.is_made = True
        if self.taken is not None:
            self.stream.on_lost = self.taken.end
            _receive(self)
        self._on_made()
        if self._rest:
            # Later, because a transport cannot pause reading yet. New data is added to these bytes.
            asyncio.get_running_loop().call_soon(self._read_on)

    def data_received(self, data: bytes) -> None:
        if self._drops_data:
            return
        self._rest = self._rest + data if self._rest else data
        if (taken := self.taken) is not None:
            taken.passed += len(data)
            if taken.is_unsent and not self._is_busy:
                _note_sent(self, taken)
        self._read_on()

    def eof_received(self) -> bool:
        """Return whether the connection should stay open, because the client may have closed only its sending
        side."""
        exchange = self.exchange
        waits = can_detect_disconnects() and exchange is not None and exchange.unread is not None
        if self.server_state.tls is not None or not waits:
            return False
        self.server_state.on_eof(self)
        self._has_ended = True
        return True

    def pause_writing(self) -> None:
        self.stream.pause_writing()

    def resume_writing(self) -> None:
        self.stream.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drops_data = True
        self._rest = b""
        if self.taken is not None:
            self.taken.shut_down()  # closing this copy would not end the connection
        if self._linger is not None:
            self._linger.cancel()
        self.server_state.connections.discard(self)
        self.server_state.idle_watch.unwatch(self)
        if self.exchange is not None:
            self.exchange.on_connection_close()
            self.exchange = None
        self.stream.connection_lost(exc)

    # ---- called by the exchange

    def finish(self, *, closes: bool) -> None:
        self._is_busy = False
        if closes or not self._is_read:
            self.close_when_sent()
            return
        self.server_state.idle_watch.watch(self)
        if self.taken is not None and _note_finished(self, self.taken):
            return
        if self._rest or self._has_ended:
            asyncio.get_running_loop().call_soon(self._read_on)
        elif (taker_of := self.server_state.moves.taker_of) is not None and not self.stays:
            give = taker_of(self.path)
            if give is not None:
                _move(self, give)

    def give_back(self) -> bool:
        return _give_back(self)

    def note_answer(self, size_bytes: int) -> None:
        if self.taken is None:
            return
        if self.stream.writing():
            self.taken.fix()
        else:
            self.taken.answer(self.stream.sent_bytes, size_bytes, len(self._rest))

    def close_when_sent(self) -> None:
        if self._rest and not self._drops_data and not self._has_ended:
            self.lingering_close()  # there may be more
            return
        self._drops_data = True
        if self._transport.is_closing():
            return
        self._transport.close()
        if self.stream.writing():
            self.server_state.idle_watch.watch(self)  # in case the client does not read

    def lingering_close(self) -> None:
        self._drops_data = True
        self._rest = b""
        if self._transport.is_closing():
            return
        if not self._transport.can_write_eof():  # TLS
            self.close_when_sent()
            return
        try:
            self._transport.write_eof()
        except OSError:
            self.stream.close()  # the client has reset the connection
            return
        self.stream.resume_reading()
        self.server_state.idle_watch.unwatch(self)
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, _end_linger, self)

    def detach(self) -> None:
        if self.taken is not None:
            self.taken.fix()
            self.stream.on_lost = None  # the WebSocket may move to another transport
        self.server_state.connections.discard(self)
        self.exchange = None
        self._drops_data = True
        self.stream.take_over()

    # ---- reading

    def _read_on(self) -> None:
        """Read the received data, until a request has to wait or the buffer of a body is full."""
        try:
            while self._rest and not self._drops_data and self._room is None:
                if self._is_read:
                    if self._is_busy or not self._read_head():
                        break
                elif self.exchange is None:
                    break
                else:
                    self._read_body(self.exchange)
        except Exception:  # a bug in this server: log it, and close the connection
            log.exception("Reading a request failed")
            self.stream.close()
        if self._transport.is_closing():
            return
        if self._drops_data:
            self.stream.resume_reading()
            return
        is_waiting = self._is_busy and self._is_read
        if self._room is not None or (is_waiting and self._rest):
            self.stream.pause_reading()
        else:
            self.stream.resume_reading()
            if self._has_ended and not is_waiting:
                self.close_when_sent()  # no complete request is left

    def _read_head(self) -> bool:
        """Start or refuse the next request; return False if its head is incomplete."""
        try:
            found = read_head(self._rest, self._searched, self.server_state.head_limits)
        except RefusedRequestError as error:
            self._is_busy = True
            Exchange(self.server_state, self).refuse_head(error)
            return True
        if found is None:
            self._searched = len(self._rest)
            self.await_head()
            return False
        head, end = found
        self._rest = self._rest[end:]
        self._searched = 0
        self._begin(head)
        return True

    def _begin(self, head: RequestHead) -> None:
        self.awaits_head = False
        self._is_busy = True
        self._is_read = False
        exchange = Exchange(self.server_state, self)  # sets `exchange`
        length = exchange.begin(head)
        if self.exchange is None:  # a WebSocket now
            rest, self._rest = self._rest, b""
            if rest:
                self.stream.data_received(rest)
        elif length == 0:
            self._is_read = True
            if not self._drops_data:
                exchange.finish()
        else:
            self._left = length or 0
            self._chunks = ChunkReader() if length is None else None
            if not (self._left and self._rest) and exchange.wants_body:  # otherwise `_read_body` does this
                self.server_state.idle_watch.watch(self)

    def _read_body(self, exchange: Exchange) -> None:
        chunks = self._chunks
        if chunks is None:
            part, self._rest = self._rest, b""
            if len(part) > self._left:  # the next request follows
                part, self._rest = part[: self._left], part[self._left :]
            self._left -= len(part)
            is_ended = not self._left
        else:
            try:
                part, self._rest = chunks.read(self._rest)
            except RefusedRequestError as error:
                self._rest = b""
                self._drops_data = True
                exchange.reject(str(error))
                return
            is_ended = chunks.is_ended
            if self._rest and not is_ended:
                self._wait_for(
                    self.server_state.limits.loop_work.current().turn(SLOW * SLICE_BYTES)
                )  # there are very many chunks
        if part:
            room = exchange.data_received(part, is_last=is_ended)
            if room is not None:
                self._wait_for(room)
        if is_ended and not self._drops_data:
            self._chunks = None
            self._is_read = True
            exchange.finish()
        elif self.can_fill and self._left >= LEAST_BYTES and exchange.body.takes_room:
            if self.taken is not None:
                self.taken.fix()  # the next data is not received into the record
            self._transport.set_protocol(
                BufferedBodyProtocol(self, exchange.body, self._left, partial(_note_filled, self))
            )

    def _wait_for(self, room: asyncio.Future[None]) -> None:
        self._room = room
        room.add_done_callback(self._take_room)

    def _take_room(self, room: asyncio.Future[None]) -> None:
        if room is self._room:
            self._room = None
            self._read_on()


def _receive(self: HTTPConnection) -> None:
    """Receive data as HTTP requests; into its record if a proxy has given the connection."""
    taken, transport = self.taken, self._transport
    if taken is None or self.server_state.tls is not None:
        transport.set_protocol(self)
    elif (record_to := getattr(transport, "record_to", None)) is not None:  # a `TornadoTransport`
        record_to(taken)
    else:
        transport.set_protocol(RecordingProtocol(self, taken))


def _note_filled(self: HTTPConnection, size_bytes: int) -> None:
    """Record that a part of a body was received into its buffer."""
    self._left -= size_bytes
    if self.taken is not None:
        self.taken.note_received(size_bytes, is_recorded=False)
        self.taken.passed += size_bytes
    is_ended, exchange = not self._left, self.exchange
    if exchange is None or self._drops_data:  # the connection ends
        _receive(self)
        return
    exchange.body_filled(size_bytes, is_last=is_ended)
    if is_ended or not exchange.body.takes_room:
        _receive(self)
    if is_ended and not self._drops_data:
        self._is_read = True
        exchange.finish()


def _end_linger(connection: HTTPConnection) -> None:
    connection.server_state.limits.hit(LINGER)
    connection.stream.close()


# ---- moves between a proxy and the processes of replicas


def _note_finished(self: HTTPConnection, taken: TakenConnection) -> bool:
    """Record the end of a request, and return whether the connection was given back."""
    taken.is_unsent = True
    _note_sent(self, taken)
    return (taken.is_asked_back or self.server_state.moves.gives_back) and give_back_idle(self)


def _note_sent(self: HTTPConnection, taken: TakenConnection) -> None:
    """Allow the connection to move again if its last response is sent; otherwise a move would cut the
    response."""
    if not self.stream.writing() and self.stream.can_move():
        taken.is_unsent = False
        taken.finish(len(self._rest))


def give_back_idle(self: HTTPConnection, again_s: float = 0.0) -> bool:
    """Give a connection back to the proxy unless it has a request; return whether it was given back.

    If its last response is not sent yet, it is given back later: after ``again_s``, then every `SENT_S`.
    """
    if not self.is_made or self._is_busy or self._drops_data or self._has_ended:
        return False
    if self.stream.writing():
        # At first at once, because uvloop sends a response at the end of this iteration of the event loop.
        asyncio.get_running_loop().call_later(again_s, give_back_idle, self, SENT_S)
        return False
    if self.taken is not None and self.taken.is_unsent:
        _note_sent(self, self.taken)
    return _give_back(self)


def _give_back(self: HTTPConnection) -> bool:
    taken = self.taken
    if taken is None or not taken.can_move() or not self.stream.can_move() or self.stream.writing():
        return False
    taken.give_back()
    _leave(self)
    return True


def _move(self: HTTPConnection, give: Callable[[MovedConnection], bool]) -> None:
    """Move a connection without a request to another process by calling ``give``, if that process accepts
    it."""
    if self._drops_data or self._rest or not self.stream.can_move() or self.stream.writing():
        return
    self._rest = self.stream.take_unread()
    copy = None
    if not self._rest:
        with suppress(OSError):  # the process has no file descriptors left
            copy = duplicate(self.stream.socket)
    if copy is not None and give(MovedConnection(copy)):
        _leave(self)
        return
    if copy is not None:
        copy.close()
    self.stream.resume_reading()
    if self._rest:
        asyncio.get_running_loop().call_soon(self._read_on)


def _leave(self: HTTPConnection) -> None:
    """Stop serving a connection, which stays open because another process has a copy of it."""
    self._drops_data = True
    self.exchange = None
    self._rest = b""
    self._transport.abort()
