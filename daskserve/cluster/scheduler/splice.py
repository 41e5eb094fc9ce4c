"""Splices: connections that the scheduler forwards between callers and workers they cannot dial.

Problem: a user program may reach only the scheduler, and Dask's own solution, `Scheduler.proxy`, is a
one-shot call without streams. Choice: the caller requests a worker on a separate connection. The supervisor
dials the worker and then forwards bytes in both directions without inspecting them. So messages are neither
unpacked nor unpickled here. Flow control, cancellation and errors work end to end, because they are ordinary
frames. The two ends agree on compression and framing as if they were connected directly.

A splice reads from one side only as fast as the other side accepts, so it holds one buffer per direction. The
scheduler's event loop runs other work after each buffer.

Connections other than TCP and TLS are not byte streams; they are forwarded message by message, as is the
handshake before. The scheduler's comms do not deserialize values wrapped by ``to_serialize``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Scheduler
from tornado.iostream import IOStream

from daskserve.cluster.channel.connect.comm_transport import wire_of
from daskserve.cluster.channel.connect.dead_peers import PeerWatch
from daskserve.cluster.channel.connect.dialling import begin_channel, connect_once
from daskserve.cluster.channel.connect.handshake import relay
from daskserve.cluster.distributed_internals import (
    NO_REPLY,
    is_plain_tcp,
    peer_handshake,
    socket_of,
    stream_of,
)
from daskserve.cluster.probe import check_caller
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.common import settings
from daskserve.common.types import WorkerAddress
from daskserve.errors import ActorLostError, ServeError
from daskserve.payload.packed_errors import dump_error

#: Timeout for a worker's answer. The worker exists, because the scheduler knows it, but it may be busy.
WORKER_TIMEOUT_S = 5.0
#: Buffer sizes per direction: small for small messages, large for bodies. The large size bounds the
#: scheduler's memory, and how long one step of a splice blocks its event loop (0.1 ms).
SMALL_BYTES, LARGE_BYTES = 4 * 1024, 256 * 1024


class Splices:
    """All splices of one scheduler."""

    def __init__(self, scheduler: Scheduler, hosts: HostRegistry) -> None:
        self._scheduler = scheduler
        self._hosts = hosts
        self._open: dict[Any, tuple[WorkerAddress, Any]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Splices of {self._scheduler.address} open={len(self._open)}>"

    async def accept(
        self, comm: Any, worker: WorkerAddress, version: str, by_socket: bool, protocol: int | None = None
    ) -> Any:
        """Connect a caller with a worker, as a handler of the scheduler; return when the splice has ended.

        ``by_socket``: the caller wants to use the TCP socket below Dask's comm. Both connections need a plain
        TCP socket for that. The scheduler only forwards the handshake: the worker refuses a caller that does
        not know the secret.
        """
        try:
            far = await self._dial(comm, worker, version, protocol)
            by_socket = by_socket and is_plain_tcp(far) and is_plain_tcp(comm)
            await self._begin(far, worker, by_socket)
        except ServeError as error:
            await comm.write({"error": dump_error(error)})
            return NO_REPLY
        self._open[comm] = (worker, far)
        try:
            near_stream, far_stream = stream_of(comm), stream_of(far)
            is_bytes = near_stream is not None and far_stream is not None
            self._watch(comm, far)
            handshake = peer_handshake(far) if is_bytes else None
            await comm.write({"handshake": handshake, "by_socket": by_socket})
            if near_stream is not None and far_stream is not None:
                await _until_one_ends(
                    _carry_bytes(near_stream, far_stream), _carry_bytes(far_stream, near_stream)
                )
            else:
                await _carry_handshake_and_messages(comm, far)
        finally:
            self._open.pop(comm, None)
            far.abort()
            comm.abort()
        return NO_REPLY

    def drop(self, worker: WorkerAddress) -> None:
        """End the splices to a worker that has left, so that callers fail at once."""
        for comm, (other, far) in list(self._open.items()):
            if other == worker:
                far.abort()
                comm.abort()

    def close(self) -> None:
        """End every splice."""
        self._is_closed = True
        for comm, (_, far) in list(self._open.items()):
            far.abort()
            comm.abort()

    def _watch(self, *comms: Any) -> None:
        # Aborting either comm ends its direction, which ends the other one too.
        for comm in comms:
            sock = socket_of(comm)
            if sock is not None:
                PeerWatch(sock, settings.channel().lost_after_s, comm.abort)

    async def _dial(self, comm: Any, worker: WorkerAddress, version: str, protocol: int | None) -> Any:
        check_caller(self._scheduler.address, version, protocol)
        self._check(worker)
        try:
            return await connect_once(
                worker,
                WORKER_TIMEOUT_S,
                handshake=peer_handshake(comm),
                deserialize=False,
                **self._scheduler.connection_args,
            )
        except OSError as error:
            raise self._unreachable(worker, error) from error

    async def _begin(self, far: Any, worker: WorkerAddress, by_socket: bool) -> None:
        try:
            await begin_channel(far, worker, WORKER_TIMEOUT_S, by_socket=by_socket)
        except OSError as error:
            raise self._unreachable(worker, error) from error
        try:
            self._check(worker)  # it may have left during an await
        except ActorLostError:
            far.abort()
            raise

    @staticmethod
    def _unreachable(worker: WorkerAddress, error: OSError) -> ActorLostError:
        return ActorLostError(f"Worker {worker} cannot be reached by the scheduler: {error}", begun=False)

    def _check(self, worker: WorkerAddress) -> None:
        # Only workers of this cluster, and only those with an open Host.
        if self._is_closed or worker not in self._scheduler.workers or not self._hosts.has(worker):
            raise ActorLostError(
                f"Worker {worker} has left the cluster or has no daskserve Host.", begun=False
            )


async def _until_one_ends(*directions: Any) -> None:
    tasks = [asyncio.create_task(each, name="daskserve-splice") for each in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # All bytes that were read have been written by then: `_carry_bytes` waits for it.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry_bytes(source: IOStream, sink: IOStream) -> None:
    """Forward bytes until either side ends."""
    buffer = memoryview(bytearray(SMALL_BYTES))
    try:
        while True:
            count = await source.read_into(buffer, partial=True)  # type: ignore[arg-type]
            # This returns once the kernel has all bytes, so the buffer can be reused.
            await sink.write(buffer[:count])
            if count == len(buffer) < LARGE_BYTES:
                buffer = memoryview(bytearray(LARGE_BYTES))
            elif count < SMALL_BYTES < len(buffer):
                buffer = memoryview(bytearray(SMALL_BYTES))
            # Neither await yields while there are bytes to read and room to write.
            await asyncio.sleep(0)
    except OSError:
        pass  # one side has disconnected


async def _carry_handshake_and_messages(near: Any, far: Any) -> None:
    try:
        await relay(wire_of(near), wire_of(far))
    except (OSError, ValueError):
        return  # one side has disconnected, or was refused
    await _until_one_ends(_carry_messages(near, far), _carry_messages(far, near))


async def _carry_messages(source: Any, sink: Any) -> None:
    """Forward messages, still packed, until either side ends."""
    try:
        while True:
            await sink.write(await source.read())
            await asyncio.sleep(0)
    except OSError:
        pass  # one side has disconnected
