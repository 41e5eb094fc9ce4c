"""Readiness callbacks of a socket, for code that reads and writes it directly.

Problem: when a process writes to a socket, Linux assumes that the writer is about to sleep. It moves the
waiting reader onto the writer's CPU. The writer of a channel keeps running, so two processes that could run
in parallel take turns on one CPU while another CPU idles. With 64 calls in flight this costs a fifth of the
time. Choice: the loop waits for a nested epoll instance that contains only the socket. The loop still wakes,
and no process is moved.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections.abc import Callable
from contextlib import suppress


class Readiness:
    """Calls a function on the running loop whenever a socket is readable, until `close`."""

    def __init__(self, sock: socket.socket, on_readable: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket_number = self._number = sock.fileno()
        self._has_writer = False
        self._close_epoll: Callable[[], object] | None = None
        if sys.platform == "linux":
            with suppress(OSError):  # for example too many open files; then the loop watches the socket
                epoll = select.epoll()
                epoll.register(sock, select.EPOLLIN)
                self._number, self._close_epoll = epoll.fileno(), epoll.close
        self._loop.add_reader(self._number, on_readable)

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        """Call a function whenever the socket is writable; None ends the calls."""
        if callback is not None:
            self._loop.add_writer(self._socket_number, callback)
        elif self._has_writer and not self._loop.is_closed():
            self._loop.remove_writer(self._socket_number)
        self._has_writer = callback is not None

    def close(self) -> None:
        """Stop all callbacks. Call this once, before the socket is closed."""
        self.on_writable(None)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._number)
        if self._close_epoll is not None:
            self._close_epoll()
