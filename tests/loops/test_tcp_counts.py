"""How many bytes were read from a connection and written to it, as the kernel counts them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from daskserve.loops.tcp_counts import Transferred, transferred


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the two ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0] as server,
    ):
        yield server, client


def test_it_counts_what_was_read_and_written_and_not_what_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    server, client = pair
    assert transferred(server) == Transferred(0, 0)
    client.sendall(b"x" * 100)
    assert server.recv(30) == b"x" * 30
    server.sendall(b"y" * 1000)
    assert transferred(server) == Transferred(30, 1000)
    before = transferred(server)
    assert before is not None
    server.setblocking(False)
    written = server.send(b"z" * 50_000_000)  # more than the client's side takes
    assert written < 50_000_000
    now = transferred(server)
    assert now is not None
    assert now.since(before) == Transferred(0, written)


def test_it_knows_nothing_of_a_connection_that_ends_or_is_not_of_tcp(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    server, client = pair
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    assert transferred(server) is None
    server.close()
    assert transferred(server) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert transferred(ours) is None
