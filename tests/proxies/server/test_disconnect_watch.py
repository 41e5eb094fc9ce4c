"""When a server detects that a client whose data has ended has left."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_exchange import ScriptedExchange

from daskserve.proxies.exchange.server_state import Connection
from daskserve.proxies.server.disconnects import LATE_S, QUICK_S, SOON_S, DisconnectWatch
from daskserve.testing import run_virtual


@pytest.fixture(autouse=True)
def impatience() -> None:
    """Do not use the shorter intervals of this folder's other tests."""


class Waiting(Connection):
    """A connection whose client has ended its data and waits for the response."""

    def __init__(self, *, has_left: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.server, _ = listener.accept()
        self.client.shutdown(socket.SHUT_WR)
        self.has_left = has_left
        #: The times at which it was probed.
        self.probes: list[tuple[float, bool]] = []
        self.closed_at: float | None = None
        stream = SimpleNamespace(closed=lambda: self.closed_at is not None, socket=self.server)
        self.exchange = ScriptedExchange(unread=stream, probe_client=self.probe)

    def probe(self, *, is_late: bool) -> None:
        self.probes.append((asyncio.get_running_loop().time(), is_late))
        if len(self.probes) == 2 and self.has_left:  # what is written resets the connection
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.client.close()

    def close(self) -> None:
        self.closed_at = asyncio.get_running_loop().time()
        self.server.close()


async def watched(*ends: tuple[float, Waiting]) -> None:
    """Watch connections whose data ends at these times, for a second."""
    server_state: Any = SimpleNamespace(connections=set(), sockets=set())
    watch = DisconnectWatch(server_state)
    watch.start()
    loop = asyncio.get_running_loop()
    for at, connection in ends:
        loop.call_at(at, server_state.on_eof, connection)
    await asyncio.sleep(1)
    watch.stop()
    for _, connection in ends:
        connection.client.close()
        connection.server.close()


def test_a_client_that_has_left_is_found_out_within_milliseconds() -> None:
    """The first check, an iteration later, sees the end; the second probes; the third sees the reset."""
    first, second = Waiting(has_left=True), Waiting(has_left=True)
    run_virtual(lambda: watched((0.0, first), (0.05, second)))
    assert first.closed_at == pytest.approx(2 * QUICK_S)
    assert second.closed_at == pytest.approx(0.05 + 2 * QUICK_S)


def test_a_client_that_waits_is_late_only_after_its_time_even_if_others_leave() -> None:
    waiting = Waiting(has_left=False)
    others = [(0.01 * number, Waiting(has_left=True)) for number in range(9)]
    run_virtual(lambda: watched((0.0, waiting), *others))
    times = [at for at, _ in waiting.probes]
    assert [at for at, is_late in waiting.probes if is_late] == [times[-1]]
    assert LATE_S <= times[-1] <= LATE_S + SOON_S + QUICK_S
    assert waiting.closed_at is None
