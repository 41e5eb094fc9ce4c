"""Accepts the connections of one server, within limits.

1. At most ``max_connections`` are open. At the limit, a new connection replaces an old one, as in nginx: the
   one that has waited longest for the rest of a request's head, otherwise the one that has been idle longest.
   If that is less than `IDLE_S`, accepting pauses: new clients wait in the backlog of the operating system,
   and current ones are not affected.
2. If the process has no file descriptors left, it closes a few connections, so that Dask and user code find
   some. For `SCARCE_S`, the number of connections that are then open is the limit.
3. If accepting fails for another reason, it pauses for `FAILED_S`, as in asyncio's servers. Tornado's
   ``add_accept_handler`` would retry in each iteration of the event loop.
4. A proxy may give a connection to a replica's process, which then serves it; see
   `daskserve.data.replica.process.given_connections`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from daskserve.common.formatting import shown
from daskserve.loops.connection_table import MovedConnection
from daskserve.loops.tasks import TaskSet
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.server_state import Connection, ServerState, no_taker
from daskserve.proxies.exchange.taken_connection import TakenConnection
from daskserve.telemetry.error_log import SparseLog

log = logging.getLogger("daskserve.proxies")

#: Maximum number of connections that are accepted in one iteration of the event loop.
_ACCEPT_AT_ONCE = 128
#: How long a connection must have been idle before a new one may replace it. A client that is about to send
#: its next request keeps its connection.
IDLE_S = 1.0
#: Pauses in accepting: at the limit, after a failure, and while a connection is being closed.
FULL_S = 0.05
FAILED_S = 1.0
_CLOSED_S = 0.001
#: How long the limit is lower after the process ran out of file descriptors. It then closes one in
#: `_SPARE_SHARE` of its connections, but at most `_SPARE`.
SCARCE_S = 10.0
_SPARE_SHARE, _SPARE = 4, 8
#: Minimum time between two log lines about pauses with the same cause.
_LOG_AGAIN_S = 60.0
#: How long a server that closes its port waits for TLS handshakes.
_HANDSHAKES_S = 0.5
#: The default of ``max_connections``, as a share of the process's file descriptors: Dask's connections, its
#: spilled data and user code also need some.
_SHARE = 3 / 4
#: Maximum default. An idle connection takes about 10 kB of memory.
_MOST = 10_000

#: The causes of pauses.
FULL, NO_DESCRIPTORS, FAILED = "max_connections", "descriptors", "other"
_NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))


def descriptor_limit() -> int | None:
    """Return the maximum number of file descriptors of this process; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def default_max_connections(descriptors: int | None) -> int:
    """Return the default of ``max_connections``, given the maximum number of file descriptors."""
    return _MOST if descriptors is None else max(1, min(_MOST, int(descriptors * _SHARE)))


def is_readable(sockets: Iterable[socket.socket]) -> bool:
    """Return whether any socket has data, or a connection that waits to be accepted.

    This needs no file descriptor, unlike epoll.
    """
    selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)
    with selector() as waiting:
        for sock in sockets:
            waiting.register(sock, selectors.EVENT_READ)
        return bool(waiting.select(0))


def _is_unused(connection: Connection) -> bool:
    """Return whether a connection has no request, and nothing was received and not read."""
    return connection.is_idle() and not is_readable([connection.stream.socket])


#: Sets up an accepted connection, at once or in a coroutine; raises `OSError` if it is lost.
Connect: TypeAlias = Callable[[HTTPConnection, socket.socket], Coroutine[Any, Any, None] | None]


class Acceptor:
    """Accepts connections on the running event loop.

    Parameters
    ----------
    server_state : ServerState
        Contains the open connections.
    max_connections : int
        Maximum number of connections, including WebSockets.
    connect : callable
        Sets up an accepted connection.

    Attributes
    ----------
    pauses : dict
        The number of pauses, by cause.
    evicted : int
        The number of idle connections closed at the limit, or when file descriptors ran out.
    """

    _loop: asyncio.AbstractEventLoop

    def __init__(self, server_state: ServerState, max_connections: int, connect: Connect) -> None:
        self._server_state = server_state
        self._max_connections = max_connections
        self._connect = connect
        self._tasks = TaskSet(log)
        self._sockets: list[socket.socket] = []
        #: The connections that are being set up, each with its task and the time when that began.
        self._setups: dict[socket.socket, tuple[asyncio.Task[None], float]] = {}
        #: The limit while file descriptors are scarce, and when that ends.
        self._fitting = max_connections
        self._scarce_until = float("-inf")
        self._pause: asyncio.TimerHandle | None = None
        #: Returns a function that gives a new connection to another process; None if there is none.
        self.taker: Callable[[], Callable[[MovedConnection], bool] | None] = no_taker
        #: Returns how many connections other processes have; lets one of them close an idle connection.
        self.given: Callable[[], int] = int
        self.evict_given: Callable[[], object] = int
        self._cause = ""  # of the current pause, or of the last attempt
        self._logged = SparseLog(_LOG_AGAIN_S)
        self.pauses = dict.fromkeys((FULL, NO_DESCRIPTORS, FAILED), 0)
        self.evicted = 0

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._server_state.connections) + len(self._server_state.sockets) + len(self._setups)

    @property
    def is_paused(self) -> bool:
        """Whether accepting pauses."""
        return self._pause is not None

    def start(self, sockets: list[socket.socket]) -> None:
        """Accept connections on listening sockets."""
        limit = descriptor_limit()
        if limit is not None and self._max_connections >= limit:
            log.warning(
                "max_connections is %d, but this process may have only %d file descriptors (ulimit -n)",
                self._max_connections,
                limit,
            )
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._watch()

    def stop(self) -> None:
        """Stop accepting. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        else:
            self._unwatch()
        self._sockets = []

    def accept_last(self, listening: socket.socket) -> None:
        """Accept the connections that wait on a socket, after `stop` and before the socket is closed."""
        with suppress(OSError):  # no more connections wait, or no file descriptors are left
            while self.open < self._max_connections:
                self._accept_next(listening)

    async def wait_set_up(self) -> None:
        """Return once all accepted connections are set up."""
        # A client may take any time for its TLS handshake.
        await self._tasks.wait(None if self._server_state.tls is None else _HANDSHAKES_S)

    async def close(self) -> None:
        """Drop the connections that are still being set up."""
        await self._tasks.close()

    def _watch(self) -> None:
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def _unwatch(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            close_idle = None
            if self.open + self.given() >= (limit := self._limit()):
                close_idle = self._find_idle()
                if close_idle is None:
                    if is_readable([listening]):
                        self.evict_given()
                    if limit < self._max_connections:
                        self._pause_for(FULL_S, NO_DESCRIPTORS, f"file descriptors suffice for {limit} only")
                    else:
                        self._pause_for(FULL_S, FULL, f"there are {limit} (max_connections)")
                    return
            try:
                self._accept_next(listening)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    self._pause_for(FAILED_S, FAILED, str(error))
                elif is_readable([listening]):  # otherwise no client waits; the error occurs anyway
                    self._make_room(str(error))
                return
            self._cause = ""
            if close_idle is not None:
                self.evicted += 1
                close_idle()
                return  # its descriptor is free in the next iteration of the event loop

    def _accept_next(self, listening: socket.socket) -> None:
        sock, _ = listening.accept()
        sock.setblocking(False)
        moved = MovedConnection(sock)
        give = self.taker()
        if give is None or not give(moved):
            self.serve(moved)

    def serve(self, moved: MovedConnection, taken: TakenConnection | None = None) -> HTTPConnection:
        """Serve a connection; for ``taken``, see `daskserve.proxies.server.receiver`."""
        sock = moved.sock
        made = partial(self._setups.pop, sock, None)
        connection = HTTPConnection(self._server_state, made, moved, taken)
        if taken is not None and self._server_state.tls is not None:
            taken.fix()  # the state of TLS cannot move
        try:
            setting_up = self._connect(connection, sock)
        except OSError as error:
            _drop(connection, sock, error)
            return connection
        if setting_up is not None:
            setup = self._tasks.spawn(_set_up(setting_up, connection, sock))
            self._setups[sock] = setup, asyncio.get_running_loop().time()
            setup.add_done_callback(lambda _: made())
        return connection

    def _limit(self) -> int:
        """Return the current maximum number of connections."""
        if self._loop.time() >= self._scarce_until:
            return self._max_connections
        return min(self._fitting, self._max_connections)

    def evict(self) -> None:
        """Close the connection that has been idle longest, if there is one."""
        if (close_idle := self._find_idle()) is not None:
            self.evicted += 1
            close_idle()

    def _make_room(self, reason: str) -> None:
        """Close idle connections, because the process has no file descriptors left."""
        spare = min(_SPARE, self.open // _SPARE_SHARE)
        if spare:
            self._fitting = self.open + self.given() - spare
            self._scarce_until = self._loop.time() + SCARCE_S
        closed = 0
        while closed <= spare and (close_idle := self._find_idle()) is not None:
            close_idle()
            closed += 1
        self.evicted += closed
        if not closed:
            self.evict_given()
        if closed:
            self._pause_for(_CLOSED_S, NO_DESCRIPTORS, reason)
        else:
            self._pause_for(FULL_S if self.open else FAILED_S, NO_DESCRIPTORS, reason)

    def _find_idle(self) -> Callable[[], object] | None:
        """Return a function that closes the connection to close first; None if there is none to close."""
        for setup, since in self._setups.values():  # a TLS handshake
            if since > asyncio.get_running_loop().time() - IDLE_S:
                break
            if not setup.cancelling():
                return setup.cancel
        watch = self._server_state.idle_watch
        idle = watch.longest(IDLE_S, Connection.is_incomplete) or watch.longest(IDLE_S, _is_unused)
        if idle is None:
            return None

        def close() -> None:
            watch.unwatch(idle)  # closing it unwatches it only later
            idle.close()

        return close

    def _pause_for(self, seconds: float, cause: str, reason: str) -> None:
        if cause != self._cause:
            self._cause = cause
            self.pauses[cause] += 1
            if self._logged.take(cause, self._loop.time()) is not None:
                log.warning("Accepting no connections for %s s at a time: %s", shown(seconds), reason)
        self._unwatch()
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._watch()


async def _set_up(
    setting_up: Coroutine[Any, Any, None], connection: HTTPConnection, sock: socket.socket
) -> None:
    try:
        await setting_up
    except OSError as error:
        _drop(connection, sock, error)
    except asyncio.CancelledError:
        if connection.taken is not None:
            connection.taken.end()
        raise


def _drop(connection: HTTPConnection, sock: socket.socket, error: OSError) -> None:
    log.debug("A client disconnected before its connection was set up: %r", error)
    sock.close()
    if connection.taken is not None:
        connection.taken.end()
