"""Splices: connections that the scheduler carries between callers and workers they cannot dial.

Problem: a user program may reach the scheduler alone, and Dask's own way round that, `Scheduler.proxy`, is a
one-shot call without streams. Choice: the caller asks for a worker on a connection of its own; the supervisor
dials that worker and from then on hands over bytes, either way, without looking at them. So messages are
neither unpacked nor unpickled here, and flow control, cancellation and errors work end to end, because they
are frames like all others. The two ends agree on compression, and on how frames become bytes, as if they were
connected directly.

What one side sends is read only as fast as the other side takes it, so a splice holds one buffer per
direction. After each of them the scheduler's loop gets its turn.

Connections that are not streams of bytes (any transport but TCP and TLS) are carried message by message; the
scheduler's comms do not deserialize what was marked by ``to_serialize``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from tornado.iostream import IOStream

from daskserve import settings
from daskserve._version import __version__
from daskserve.cluster.channel.dialling import begin_channel, connect_once
from daskserve.cluster.channel.vanishing import PeerWatch
from daskserve.cluster.distributed_internals import is_plain_tcp, peer_handshake, socket_of, stream_of
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.errors import ActorLostError, ServeError, VersionMismatchError
from daskserve.payload import dump_error
from daskserve.types import WorkerAddress

#: How long a worker may take to answer. The scheduler has it in its list, so it is there, but may be busy.
WORKER_TIMEOUT_S = 5.0
#: A direction's buffer: small while small messages go by, large for bodies. The large one bounds what the
#: scheduler holds, and how long its loop is held up by one turn of a splice (0.1 ms).
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

    async def accept(self, comm: Any, worker: WorkerAddress, version: str, by_socket: bool) -> Any:
        """Connect a caller with a worker; the scheduler's handler, which returns when that has ended.

        With ``by_socket`` the caller would like to leave Dask's comm for the TCP socket below it; that needs
        such a socket at either end.
        """
        try:
            far = await self._dial(comm, worker, version)
            by_socket = by_socket and is_plain_tcp(far) and is_plain_tcp(comm)
            await self._begin(far, worker, by_socket)
        except ServeError as error:
            await comm.write({"error": dump_error(error)})
            return Status.dont_reply
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
                await _until_one_ends(_carry_messages(comm, far), _carry_messages(far, comm))
        finally:
            self._open.pop(comm, None)
            far.abort()
            comm.abort()
        return Status.dont_reply

    def drop(self, worker: WorkerAddress) -> None:
        """End what goes to a worker that is gone, so that callers hear of it at once."""
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
        # Once either is aborted, its direction ends, and the other with it.
        for comm in comms:
            sock = socket_of(comm)
            if sock is not None:
                PeerWatch(sock, settings.channel().lost_after_s, comm.abort)

    async def _dial(self, comm: Any, worker: WorkerAddress, version: str) -> Any:
        if version != __version__:
            raise VersionMismatchError(
                f"The scheduler {self._scheduler.address} has daskserve {__version__}, this program has "
                f"{version}; install the same version on both and restart the older one."
            )
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
            self._check(worker)  # it may have left meanwhile
        except ActorLostError:
            far.abort()
            raise

    @staticmethod
    def _unreachable(worker: WorkerAddress, error: OSError) -> ActorLostError:
        return ActorLostError(f"Worker {worker} cannot be reached by the scheduler: {error}", begun=False)

    def _check(self, worker: WorkerAddress) -> None:
        # Only workers of this cluster, and only those that a channel can be opened to.
        if self._is_closed or worker not in self._scheduler.workers or not self._hosts.has(worker):
            raise ActorLostError(f"Worker {worker} has left the cluster, or daskserve it.", begun=False)


async def _until_one_ends(*directions: Any) -> None:
    tasks = [asyncio.create_task(each, name="daskserve-splice") for each in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # What was read has been written out by then: `_carry_bytes` waits for it.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry_bytes(source: IOStream, sink: IOStream) -> None:
    """Hand over bytes until either side ends."""
    buffer = memoryview(bytearray(SMALL_BYTES))
    try:
        while True:
            count = await source.read_into(buffer, partial=True)  # type: ignore[arg-type]
            # Returns when all of it is with the kernel, so the buffer may be used again.
            await sink.write(buffer[:count])
            if count == len(buffer) < LARGE_BYTES:
                buffer = memoryview(bytearray(LARGE_BYTES))
            elif count < SMALL_BYTES < len(buffer):
                buffer = memoryview(bytearray(SMALL_BYTES))
            # Neither wait gives way where there always is something to read and room to write.
            await asyncio.sleep(0)
    except OSError:
        pass  # one side has gone


async def _carry_messages(source: Any, sink: Any) -> None:
    """Hand over messages, still packed, until either side ends."""
    try:
        while True:
            await sink.write(await source.read())
            await asyncio.sleep(0)
    except OSError:
        pass  # one side has gone
