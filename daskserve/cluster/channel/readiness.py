"""When a socket can be read or written; for code that reads and writes it itself.

Problem: when a program writes to a socket, Linux takes that for a hand-over. It moves whoever waits for the
socket onto the writer's processor, which the writer is expected to leave at once. The writer of a channel has
more to do, so two processes that could work side by side take turns on one processor while another one idles:
a fifth of the time with 64 calls under way. Choice: the loop waits for an epoll instance that holds nothing
but the socket. That wakes it all the same, and moves nobody.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections.abc import Callable
from contextlib import suppress


class Readiness:
    """Calls back on the present loop, as often as a socket can be read, until it is closed."""

    def __init__(self, sock: socket.socket, on_readable: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket_number = self._number = sock.fileno()
        self._has_writer = False
        self._close_epoll: Callable[[], object] | None = None
        if sys.platform == "linux":
            with suppress(OSError):  # too many files are open, perhaps; the socket itself will do
                epoll = select.epoll()
                epoll.register(sock, select.EPOLLIN)
                self._number, self._close_epoll = epoll.fileno(), epoll.close
        self._loop.add_reader(self._number, on_readable)

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        """Call back whenever there is room to write; with None, no more."""
        if callback is not None:
            self._loop.add_writer(self._socket_number, callback)
        elif self._has_writer and not self._loop.is_closed():
            self._loop.remove_writer(self._socket_number)
        self._has_writer = callback is not None

    def close(self) -> None:
        """Call back no more. To be done once, before the socket is closed."""
        self.on_writable(None)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._number)
        if self._close_epoll is not None:
            self._close_epoll()
