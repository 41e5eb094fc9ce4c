"""Accepts the connections of one server, within limits.

1. At most ``max_connections`` are open. At the limit, a new connection replaces an old one, as in nginx: the
   one that has waited longest for the rest of a request's head, otherwise the one that has been idle longest.
   If that is less than `IDLE_S`, accepting pauses: new clients wait in the backlog of the operating system,
   and current ones are not affected.
2. If the process has no file descriptors left, it closes a few connections, so that Dask and user code find
   some. For `SCARCE_S`, the number of connections that are then open is the limit.
3. If accepting fails for another reason, it pauses for `FAILED_S`, as in asyncio's servers. Tornado's
   ``add_accept_handler`` would retry in each iteration of the event loop.
4. Several processes may accept from the same sockets. A process that did not bind them waits before it
   accepts, longer if it has more connections, and then accepts few, so that all get an equal share. Otherwise
   the process that the operating system wakes first would get most of them. The process that has bound the
   sockets leaves connections to the others. If they accept none during `CHECKS` checks, they are blocked or
   were killed, and it accepts as well.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from daskserve.common.formatting import shown
from daskserve.loops.tasks import TaskSet
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.server_state import Connection, ServerState
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
#: Interval and number of the checks whether other processes accept from a socket that this one has bound.
CHECK_S, CHECKS = 0.02, 10
#: A process that has not bound the sockets waits at most this long before it accepts, and half as long if it
#: has `_HALF` connections. It then accepts one connection, and one more for each `_PER_SHARE` that it has.
_SHARING_S, _HALF, _PER_SHARE = 0.02, 64, 16
#: How long this process stops leaving connections to others, after they have accepted none.
BLOCKED_S = 1.0
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

#: The offset of ``tcpi_unacked`` in Linux' ``struct tcp_info``.
_TCPI_UNACKED = 24

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


def _backlog_of(listening: socket.socket) -> int:
    """Return how many connections wait on a listening socket; 1 if the system does not report it."""
    if sys.platform != "linux":
        return 1
    # For a listening socket, ``tcpi_unacked`` is the length of its queue.
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCPI_UNACKED + 4)
    return int.from_bytes(info[_TCPI_UNACKED:], sys.byteorder)


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
        #: Whether another process has bound the sockets.
        self._is_guest = False
        #: Whether other processes accept from these sockets; the number of checks since they last accepted a
        #: connection; how many waited at the last check; until when none is left to them.
        self._has_others = False
        self._checks = self._waited = 0
        self._others_blocked_until = float("-inf")
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

    def start(self, sockets: list[socket.socket], *, is_guest: bool = False) -> None:
        """Accept connections on listening sockets; ``is_guest`` if another process has bound them."""
        self._is_guest = is_guest
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

    def leave_to_others(self, has_others: bool) -> None:
        """Set whether other processes accept from these sockets; they get the connections first."""
        self._has_others = has_others

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
            self._loop.add_reader(sock, self._find, sock)

    def _unwatch(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)

    def _find(self, listening: socket.socket) -> None:
        """Accept waiting connections, or leave them to other processes first."""
        if self._has_others and self._loop.time() >= self._others_blocked_until:
            self._unwatch()
            self._checks, self._waited = 0, self._waiting()
            self._pause = self._loop.call_later(CHECK_S, self._check_backlog)
        elif self._is_guest and (count := self.open):
            self._unwatch()
            self._pause = self._loop.call_later(_SHARING_S * count / (count + _HALF), self._accept_share)
        else:
            self._accept(listening)

    def _waiting(self) -> int:
        """Return how many connections wait; see `_backlog_of`."""
        return sum(map(_backlog_of, self._sockets)) if is_readable(self._sockets) else 0

    def _accept_share(self) -> None:
        """Accept some connections that no process with fewer connections has accepted."""
        self._resume()
        for each in list(self._sockets):
            if self._pause is None:
                self._accept(each)

    def _check_backlog(self) -> None:
        """Go on leaving connections to other processes, unless these have accepted none for some time."""
        if waiting := self._waiting():
            self._checks = 0 if waiting < self._waited else self._checks + 1
            self._waited = waiting
            if self._checks < CHECKS:
                self._pause = self._loop.call_later(CHECK_S, self._check_backlog)
                return
            self._others_blocked_until = self._loop.time() + BLOCKED_S
        self._resume()

    def _accept(self, listening: socket.socket) -> None:
        at_once = 1 + self.open // _PER_SHARE if self._is_guest else _ACCEPT_AT_ONCE
        for _ in range(at_once):
            close_idle = None
            if self.open >= (limit := self._limit()):
                close_idle = self._find_idle()
                if close_idle is None:
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
                if error.errno == errno.EINVAL:  # the process that bound the socket has stopped listening
                    self._loop.remove_reader(listening)
                    self._sockets.remove(listening)
                elif error.errno not in _NO_DESCRIPTORS:
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
        made = partial(self._setups.pop, sock, None)
        try:
            setting_up = self._connect(HTTPConnection(self._server_state, made), sock)
        except OSError as error:
            _drop(sock, error)
            return
        if setting_up is not None:
            setup = self._tasks.spawn(_set_up(setting_up, sock))
            self._setups[sock] = setup, self._loop.time()
            setup.add_done_callback(lambda _: made())

    def _limit(self) -> int:
        """Return the current maximum number of connections."""
        if self._loop.time() >= self._scarce_until:
            return self._max_connections
        return min(self._fitting, self._max_connections)

    def _make_room(self, reason: str) -> None:
        """Close idle connections, because the process has no file descriptors left."""
        spare = min(_SPARE, self.open // _SPARE_SHARE)
        if spare:
            self._fitting = self.open - spare
            self._scarce_until = self._loop.time() + SCARCE_S
        closed = 0
        while closed <= spare and (close_idle := self._find_idle()) is not None:
            close_idle()
            closed += 1
        self.evicted += closed
        if closed:
            self._pause_for(_CLOSED_S, NO_DESCRIPTORS, reason)
        else:
            self._pause_for(FULL_S if self.open else FAILED_S, NO_DESCRIPTORS, reason)

    def _find_idle(self) -> Callable[[], object] | None:
        """Return a function that closes the connection to close first; None if there is none to close."""
        for setup, since in self._setups.values():  # a TLS handshake
            if since > self._loop.time() - IDLE_S:
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


async def _set_up(setting_up: Coroutine[Any, Any, None], sock: socket.socket) -> None:
    try:
        await setting_up
    except OSError as error:
        _drop(sock, error)


def _drop(sock: socket.socket, error: OSError) -> None:
    log.debug("A client disconnected before its connection was set up: %r", error)
    sock.close()
