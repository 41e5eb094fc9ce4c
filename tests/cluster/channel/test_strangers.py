"""What a stranger who only reaches a worker's port can do over the Dask connections that channels use."""

from __future__ import annotations

import asyncio
import pickle
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from by_task import by_task
from distributed import Security
from distributed.comm import connect, listen
from distributed.protocol import to_serialize

from daskserve.cluster.channel.connect.comm_transport import StreamWire
from daskserve.cluster.channel.connect.dialling import CHANNEL_OP, READY, dial_worker
from daskserve.cluster.channel.connect.handshake import HELLO_BYTES, UntrustedPeerError
from daskserve.cluster.channel.connect.keyring import ChannelSecret, Keyring
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.channel.wire.transport import HEAD, MAGIC, SIZE
from daskserve.cluster.distributed_internals import stream_of
from daskserve.common.types import (
    ActorAddress,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    Payload,
    Receive,
    Send,
    nothing_to_receive,
)

DEADLINE_S = 10.0
PROTOCOLS = ("inproc", "tls", "tcp")


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.temporary()


class Port:
    """A worker's port, whose only handler is that of channels."""

    def __init__(self, address: str, arguments: dict[str, Any], pool: ChannelPool) -> None:
        self.address = address
        self.arguments = arguments
        self.pool = pool

    async def connect(self, by_socket: bool = True) -> Any:
        """Return a connection on which a channel was requested, as a stranger can do."""
        comm = await connect(self.address, **self.arguments)
        await comm.write({"op": CHANNEL_OP, "by_socket": by_socket})
        assert await comm.read() == READY
        return comm

    async def call(self, keyring: Keyring) -> Any:
        """Call an actor of the worker as a member of the cluster does, and return the answer."""
        dial = partial(dial_worker, keyring=keyring, **self.arguments)
        pool = ChannelPool(_nobody, dial)
        answers: list[Message] = []

        async def keep(message: Message) -> None:
            answers.append(message)

        envelope = Envelope(EnvelopeKind.CALL, {}, Payload(b"question"))
        try:
            actor = ActorAddress("actor", self.address, 1)
            await pool.request(actor, envelope).respond(nothing_to_receive, keep)
        finally:
            await pool.close()
        return bytes(answers[0]["payload"].data)


async def _nobody(*_: Any) -> Load:
    raise AssertionError("no request was to arrive")


@by_task
async def _answer(name: str, number: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
    await send({"type": "call.result", "payload": Payload(b"answer")})
    return Load()


@asynccontextmanager
async def opened_port(protocol: str, security: Security, keyring: Keyring) -> AsyncIterator[Port]:
    is_tls = protocol == "tls"
    pool = ChannelPool(_answer, _nobody, keyring=keyring)

    async def accept(comm: Any) -> None:
        message = await comm.read()
        assert message.pop("op") == CHANNEL_OP
        await pool.accept(comm, **message)

    address = "inproc://" if protocol == "inproc" else f"{protocol}://127.0.0.1:0"
    listening = security.get_listen_args("worker") if is_tls else {}
    listener = await listen(address, accept, **listening)
    dialling = security.get_connection_args("client") if is_tls else {}
    try:
        yield Port(listener.contact_address, dialling, pool)
    finally:
        await pool.close()
        listener.stop()


def keyring(*secrets: ChannelSecret) -> Keyring:
    found = Keyring()
    for secret in secrets:
        found.add(secret)
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_only_members_of_the_cluster_are_answered(protocol: str, security: Security) -> None:
    secret = ChannelSecret()

    async with opened_port(protocol, security, keyring(secret)) as port:
        for stranger in (keyring(), keyring(ChannelSecret())):
            with pytest.raises(UntrustedPeerError):
                await port.call(stranger)
        assert await port.call(keyring(secret)) == b"answer"
        assert ("channel_refusals", ("stranger",), 2) in port.pool.samples()


async def test_a_claim_of_two_gigabytes_takes_no_memory(security: Security) -> None:
    async with opened_port("tls", security, keyring(ChannelSecret())) as port:
        comm = await port.connect()
        stream = stream_of(comm)
        assert stream is not None
        tracemalloc.start()
        try:
            # Long enough for a handshake, but it is a frame.
            await stream.write(HEAD.pack(MAGIC, 1) + SIZE.pack(2 << 30) + bytes(HELLO_BYTES))
            with pytest.raises(OSError, match="Stream is closed"):
                await stream.read_bytes(1)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        comm.abort()


class Bomb:
    """Notes that it was unpickled."""

    unpickled = 0

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    Bomb.unpickled += 1


@pytest.mark.parametrize(("protocol", "by_socket"), [("tcp", True), ("tls", False)])
async def test_nothing_is_unpickled_before_the_handshake(
    protocol: str, by_socket: bool, security: Security
) -> None:
    async with opened_port(protocol, security, keyring(ChannelSecret())) as port:
        comm = await port.connect(by_socket)
        await comm.write([(0, 0, to_serialize(Bomb()), pickle.dumps(Bomb()))] * 10)
        with pytest.raises(OSError, match=r"closed|reset|in <TCP|in <TLS"):
            await comm.read()
        assert Bomb.unpickled == 0
        comm.abort()


async def test_at_most_64_kib_are_read_before_the_handshake(security: Security) -> None:
    """The rest of what a stranger sends stays in the kernel until the connection is closed."""
    read: list[int] = []

    class Watched(StreamWire):
        async def receive(self, size_bytes: int) -> bytes:
            data = await super().receive(size_bytes)
            read.append(len(data) + self._stream._read_buffer_size)
            return data

    accepted: asyncio.Queue[Any] = asyncio.Queue()
    listener = await listen("tcp://127.0.0.1:0", accepted.put)
    comm = await connect(listener.contact_address)
    far = await accepted.get()
    stream = stream_of(comm)
    assert stream is not None
    writing = asyncio.ensure_future(stream.write(bytes(8 << 20)))
    await asyncio.sleep(0)
    wire = Watched(far)
    await wire.receive(HELLO_BYTES)
    wire.abort()
    with pytest.raises(OSError):
        await writing
    assert HELLO_BYTES <= read[0] <= 64 * 1024
    comm.abort()
    listener.stop()


async def test_with_tls_a_stranger_without_a_certificate_cannot_ask_for_a_channel(security: Security) -> None:
    async with opened_port("tls", security, keyring(ChannelSecret())) as port:
        context = ssl.create_default_context(cadata=security.tls_ca_file)
        context.check_hostname = False
        for other in (context, Security.temporary().get_connection_args("client")["ssl_context"]):
            with pytest.raises(OSError):
                await connect(port.address, timeout=1, ssl_context=other)
        host, _, number = port.address.rpartition("/")[2].partition(":")
        with socket.create_connection((host, int(number))) as plain:
            plain.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(plain, bytes(100))
            with suppress(ConnectionResetError):
                while await loop.sock_recv(plain, 100):  # a TLS alert
                    pass


async def test_a_pool_that_closes_ends_the_handshakes_under_way(security: Security) -> None:
    async with opened_port("tcp", security, keyring(ChannelSecret())) as port:
        comm = await port.connect()
        await port.pool.close()
        with pytest.raises(OSError):
            await comm.read()
        comm.abort()
