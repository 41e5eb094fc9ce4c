"""Processes that user code forks from a worker or a replica's process, without ``exec``.

A forked process has the sockets of its parent, and holds them open for as long as it lives: connections of
other requests do not end when the worker closes them, and when the worker dies, neither its clients nor the
scheduler notice. It also has the parent's event loops, and would take events from them.

So in a forked process, the connections of daskserve and Dask and all inherited event loops are disconnected:
their descriptors become those of ``/dev/null``. Closing them instead would be dangerous: an object of user
code might later close a descriptor number that is in use again. All other files and sockets stay open. This
works on Linux; on other systems, nothing is changed.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import urlsplit

from daskserve.loops.at_fork import call_in_forks

_DESCRIPTORS = "/proc/self/fd"
_EVENT_LOOP = "anon_inode:[eventpoll]"


class ForkGuard:
    """Detaches forked processes from this one's connections, from `open` until `close`.

    Parameters
    ----------
    peers : callable
        Returns the addresses that this process has connected to: ``tcp://host:port``, or with another scheme.
    """

    def __init__(self, peers: Callable[[], Collection[str]] = tuple) -> None:
        self._peers = peers
        self._is_open = False

    def open(self) -> None:
        """Detach processes that are forked from now on."""
        self._is_open = True
        if sys.platform == "linux":
            call_in_forks(self._forked)

    def _forked(self) -> None:
        if self._is_open:
            self.cut_off()

    def close(self) -> None:
        """Stop detaching forked processes; idempotent."""
        self._is_open = False

    def cut_off(self) -> None:
        """Redirect the inherited event loops and the connections of daskserve and Dask to ``/dev/null``."""
        redirect([*_event_loops(), *_connections({_endpoint(each) for each in self._peers()})])


def redirect(descriptors: Iterable[int]) -> None:
    """Redirect descriptors to ``/dev/null``."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in descriptors:
        with suppress(OSError):
            os.dup2(nowhere, each, inheritable=False)
    os.close(nowhere)


def end_fork() -> NoReturn:
    """End this process, which is a fork in which user code has returned; the parent answers the request."""
    os._exit(0)


def _event_loops() -> Iterator[int]:
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if os.readlink(f"{_DESCRIPTORS}/{name}") == _EVENT_LOOP:
                yield int(name)


def _connections(peers: Collection[Any]) -> Iterator[int]:
    """Yield the listening sockets, the connections that they accepted, and the connections to some peers."""
    found: dict[int, tuple[Any, Any]] = {}
    listening = set()
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            known = socket.socket(fileno=int(name))
            try:
                if known.family not in (socket.AF_INET, socket.AF_INET6) or known.type != socket.SOCK_STREAM:
                    continue
                port = known.getsockname()[1]
                if known.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(port)
                    found[int(name)] = port, None
                else:
                    found[int(name)] = port, tuple(known.getpeername()[:2])
            finally:
                known.detach()
    for descriptor, (port, peer) in found.items():
        if port in listening or peer in peers:
            yield descriptor


def _endpoint(address: str) -> tuple[str | None, int | None]:
    parts = urlsplit(address)
    return parts.hostname, parts.port
