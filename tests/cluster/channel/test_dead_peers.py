"""Detection of silent machines from the kernel's connection state."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from daskserve.cluster.channel.connect import dead_peers
from daskserve.cluster.channel.connect.dead_peers import AckProgress, PeerWatch

DEADLINE_S = 10


def info(*, last_ack_ms: int = 0, unacked: int = 0, acked_bytes: int = 0, not_sent_bytes: int = 0) -> bytes:
    raw = bytearray(148)
    for at, value in ((24, unacked), (56, last_ack_ms), (144, not_sent_bytes)):
        struct.pack_into("I", raw, at, value)
    struct.pack_into("Q", raw, 120, acked_bytes)
    return bytes(raw)


class ScriptedSocket(socket.socket):
    """A socket whose ``TCP_INFO`` values a test scripts."""

    def __init__(self, *infos: bytes) -> None:
        super().__init__()
        self.infos = list(infos)

    def getsockopt(self, *_: Any) -> Any:
        if not self.infos:
            raise OSError("closed")
        return self.infos.pop(0)


@pytest.fixture(autouse=True)
def checks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_peers, "PERIOD_S", 0.001)


def times_lost(*infos: bytes, lost_after_s: float = 5.0) -> int:
    """Return how often a connection was reported lost while the kernel returned these values."""
    lost: list[int] = []

    async def main() -> None:
        with ScriptedSocket(*infos) as sock:
            PeerWatch(sock, lost_after_s, lambda: lost.append(len(sock.infos)))
            async with asyncio.timeout(DEADLINE_S):
                while sock.infos and not lost:  # noqa: ASYNC110 - timers of the watch empty it
                    await asyncio.sleep(0.001)

    asyncio.run(main())
    return len(lost)


SILENT, HEARD = info(last_ack_ms=5001), info(last_ack_ms=4999)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports this")
def test_two_consecutive_silent_checks_are_a_loss() -> None:
    for infos, times in [
        ([SILENT, SILENT], 1),
        ([HEARD, SILENT, SILENT, SILENT], 1),
        ([info(last_ack_ms=9000, unacked=1, not_sent_bytes=5)] * 2, 1),
        ([HEARD] * 5, 0),
        # This machine may have been suspended itself.
        ([SILENT, HEARD, SILENT, HEARD], 0),
        # The other process does not read.
        ([info(last_ack_ms=60_000, not_sent_bytes=1)] * 3, 0),
        # A kernel with a shorter struct.
        ([info(last_ack_ms=60_000)[:104]] * 3, 0),
    ]:
        assert times_lost(*infos) == times, infos


def silences(*infos: bytes) -> list[float]:
    """Return the silence at each of these checks, one a second."""
    silence = AckProgress(now=0.0)
    return [silence.at(each, now) for now, each in enumerate(infos, start=1)]


def test_bytes_that_are_never_acknowledged_are_silence_although_packets_arrive() -> None:
    # Packets are lost in one direction: the other machine retransmits, so its packets always arrive.
    stuck = info(last_ack_ms=10, unacked=2, acked_bytes=70)
    assert silences(info(acked_bytes=70), *[stuck] * 6) == [0, 1, 2, 3, 4, 5, 6]


def test_progress_ends_the_silence() -> None:
    for well in [
        info(acked_bytes=70),
        info(unacked=2, acked_bytes=71),
        info(acked_bytes=70, not_sent_bytes=9),
    ]:
        stuck = info(unacked=2, acked_bytes=70)
        assert silences(stuck, stuck, stuck, well)[-2:] == [2, 0], well
        moving = [info(unacked=2, acked_bytes=each) for each in range(9)]
        assert silences(*moving)[1:] == [0] * 8, well


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports this")
@pytest.mark.parametrize(("lost_after_s", "left"), [(0.0, 1), (5.0, 0)])
async def test_a_socket_left_to_tcp_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, lost_after_s: float, left: int
) -> None:
    monkeypatch.setattr(dead_peers, "PERIOD_S", 0)
    with ScriptedSocket(SILENT) as sock:
        PeerWatch(sock, lost_after_s, lambda: None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(sock.infos) == left


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
    ):
        far, _ = server.accept()
        with far:
            yield near, far


def fill(sock: socket.socket) -> None:
    sock.setblocking(False)
    try:
        while True:
            sock.send(bytes(65536))
    except BlockingIOError:
        sock.setblocking(True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports this")
@pytest.mark.parametrize("is_read", [True, False])
def test_the_kernel_fills_the_fields_that_are_read(connected: Any, is_read: bool) -> None:
    near, far = connected
    if is_read:
        near.send(b"x")
        assert far.recv(1) == b"x"
    else:
        fill(near)  # the other process does not read
    # The last acknowledgement is older than zero, because time passes in this test.
    deadline = time.monotonic() + DEADLINE_S
    while True:
        raw = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 148)
        unacked, last_ack_ms, acked_bytes, not_sent_bytes = dead_peers._INFO.unpack(raw)
        if (unacked, not_sent_bytes > 0) == (0, not is_read) and 20 <= last_ack_ms < DEADLINE_S * 1000:
            break
        assert time.monotonic() < deadline, (unacked, last_ack_ms, not_sent_bytes)
    assert acked_bytes == 2 or not is_read  # the handshake counts as a byte
    assert AckProgress(5.0).at(raw, 5.0) == (last_ack_ms / 1000 if is_read else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports this")
def test_silent_connections_are_probed(connected: Any) -> None:
    near, _ = connected

    async def main() -> None:
        PeerWatch(near, 5.0, lambda: None)

    asyncio.run(main())
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
