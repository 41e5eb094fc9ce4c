"""Dialling: connecting a process to a worker, directly or through the scheduler.

Problem: a user program may reach only the scheduler (NAT, a firewall, Kubernetes), and an unanswered dial
takes seconds to fail. Choice: dial the worker once, with a short timeout. If that fails, ask the scheduler,
which knows whether the worker is alive, to splice a connection to it (`daskserve.cluster.scheduler.splice`).
The result is remembered per host for a while, so that later connections do not pay again.

A dead worker costs one additional request: the scheduler answers at once, and its host is not marked as
unreachable.

On both routes, this process and the worker then prove to each other that they belong to the same Dask cluster
(`daskserve.cluster.channel.connect.handshake`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from distributed.comm import get_address_host

from daskserve._version import PROTOCOL, __version__
from daskserve.cluster.channel.connect.comm_transport import take_over, wire_of
from daskserve.cluster.channel.connect.handshake import UntrustedPeerError, introduce
from daskserve.cluster.channel.connect.keyring import Keyring
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.cluster.distributed_internals import agree, connect_comm, is_plain_tcp
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.common.settings import ChannelSettings
from daskserve.common.types import WorkerAddress
from daskserve.errors import ActorLostError, ServeError
from daskserve.payload.packed_errors import load_error

logger = logging.getLogger("daskserve.channel")

#: The scheduler handler that splices, and the worker handler that takes over a channel's connection.
SPLICE_OP = "daskserve_splice"
CHANNEL_OP = "daskserve_channel"
#: The Host's answer, after which the handshake begins.
READY = "ready"

#: Timeout of a connection to the scheduler; long, because nothing works without it.
SCHEDULER_TIMEOUT_S = 10.0
#: Timeout of a direct dial when there is no other route to the worker.
ONLY_ROUTE_TIMEOUT_S = 5.0


async def connect_once(
    address: str, timeout_s: float, *, handshake: Mapping[str, Any] | None = None, **connection_args: Any
) -> Any:
    """Return a Dask comm to an address after a single attempt; see `connect_comm` for ``handshake``.

    `distributed.comm.connect` retries a refused connection until its timeout, and waits forever for a server
    that accepts the connection and then sends nothing, as some middleboxes do.

    Raises
    ------
    OSError Nothing answers at the address; if nothing answered in time, it is a `TimeoutError`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await connect_comm(address, handshake=handshake, **connection_args)
    except TimeoutError:
        raise TimeoutError(f"{address} did not answer within {shown(timeout_s)} s") from None


@asynccontextmanager
async def _answering(comm: Any, worker: WorkerAddress, timeout_s: float) -> AsyncIterator[None]:
    """Limit the time of an exchange with a worker; abort the connection if it fails."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        comm.abort()
        raise TimeoutError(f"{worker} did not answer within {shown(timeout_s)} s") from None
    except BaseException:
        comm.abort()
        raise


async def begin_channel(
    comm: Any, worker: WorkerAddress, timeout_s: float, *, by_socket: bool = True
) -> None:
    """Make a worker's Host take over a new connection as a channel; see `take_over` for ``by_socket``.

    Raises
    ------
    ActorLostError
        The worker has no Host: another process may use the address now.
    OSError
        The worker is gone, or did not answer in time.
    """
    async with _answering(comm, worker, timeout_s):
        await comm.write({"op": CHANNEL_OP, "by_socket": by_socket})
        if await comm.read() != READY:  # Dask answers an unknown operation with None
            raise ActorLostError(f"Worker {worker} has no Host of daskserve.", begun=False)


async def join_channel(
    comm: Any, worker: WorkerAddress, timeout_s: float, keyring: Keyring, *, by_socket: bool = True
) -> Transport:
    """Perform the handshake with a worker whose Host has taken over the connection; return the transport.

    Raises
    ------
    UntrustedPeerError
        The worker knows none of this process's secrets.
    OSError
        The worker is gone, did not answer in time, or is not the worker.
    """
    async with _answering(comm, worker, timeout_s):
        await introduce(wire_of(comm), keyring)
    return take_over(comm, by_socket=by_socket)


async def dial_worker(
    worker: WorkerAddress,
    timeout_s: float = ONLY_ROUTE_TIMEOUT_S,
    *,
    keyring: Keyring,
    connect: Callable[..., Awaitable[Any]] = connect_once,
    **connection_args: Any,
) -> Transport:
    """Return a connection to a worker; see `begin_channel` and `join_channel`."""
    comm = await connect(worker, timeout_s, **connection_args)
    comm.name = "daskserve channel"
    await begin_channel(comm, worker, timeout_s)
    return await join_channel(comm, worker, timeout_s, keyring)


class RouteMemory:
    """The hosts that recently could not be dialled."""

    def __init__(self, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._blocked_until: dict[str, float] = {}
        self._has_reached_one = False

    def is_blocked(self, host: str, now: float) -> bool:
        """Return whether dialling a host should be skipped.

        If one host is blocked and no host was ever reached, as behind NAT, all hosts are skipped.
        """
        blocked = {each for each, until in self._blocked_until.items() if now < until}
        return host in blocked or (bool(blocked) and not self._has_reached_one)

    def reached(self, host: str) -> None:
        self._has_reached_one = True
        self._blocked_until.pop(host, None)

    def blocked(self, host: str, now: float) -> None:
        self._blocked_until = {each: until for each, until in self._blocked_until.items() if now < until}
        self._blocked_until[host] = now + self._expiry_s


class Dialler:
    """Opens the connections for the channels of a process.

    Parameters
    ----------
    connection_args
        The connection arguments of Dask's comms, including TLS.
    find_scheduler
        Returns the scheduler's address, or None if the connection to it is closed.
    keyring
        The secrets of the cluster that this process knows. The dialler fetches the current one if there is
        none, or if a worker knows none of them.
    """

    def __init__(
        self,
        connection_args: Mapping[str, Any],
        find_scheduler: Callable[[], str | None],
        settings: ChannelSettings,
        clock: Clock,
        keyring: Keyring,
        connect: Callable[..., Awaitable[Any]] = connect_once,
    ) -> None:
        self._connection_args = dict(connection_args)
        self._find_scheduler = find_scheduler
        self._settings = settings
        self._clock = clock
        self._keyring = keyring
        self._connect = connect
        self._memory = RouteMemory(settings.retry_direct_s)

    async def dial(self, worker: WorkerAddress) -> Transport:
        """Return a connection that a worker's Host has taken over as a channel.

        Raises
        ------
        ActorLostError The scheduler reports that the worker is gone, or that it cannot reach the worker
        either; or the worker belongs to another Dask cluster. OSError
            The scheduler cannot be reached. With the route "direct": the worker cannot be reached.
        """
        return await self._with_secret(partial(self._dial, worker))

    async def _dial(self, worker: WorkerAddress) -> Transport:
        if self._settings.route == "direct":
            return await self._dial_directly(worker, ONLY_ROUTE_TIMEOUT_S)
        host = get_address_host(worker)
        if self._settings.route == "scheduler":
            return await self._dial_through_scheduler(worker)
        if self._memory.is_blocked(host, self._clock.now()):
            try:
                return await self._dial_through_scheduler(worker)
            except OSError as error:
                logger.debug("The scheduler is away (%s); dialling %s directly", error, worker)
        try:
            transport = await self._dial_directly(worker, self._settings.direct_timeout_s)
        except (OSError, ValueError) as error:
            # A ValueError means that the address is not valid in this process.
            transport = await self._dial_through_scheduler(worker)
            # Not earlier: only now is the worker known to be alive.
            self._memory.blocked(host, self._clock.now())
            logger.info(
                "Worker %s cannot be dialled (%s); its requests go through the scheduler", worker, error
            )
            return transport
        self._memory.reached(host)
        return transport

    def note_silence(self, worker: WorkerAddress) -> None:
        """Record that a worker's machine was silent, so that the next dial uses the scheduler."""
        self._memory.blocked(get_address_host(worker), self._clock.now())

    async def dial_directly(self, worker: WorkerAddress) -> Transport:
        """Return a direct connection to a worker that was last reached through the scheduler.

        Raises
        ------
        ActorLostError
            Another process has taken over the worker's address.
        OSError
            The worker cannot be reached.
        """
        transport = await self._with_secret(
            partial(self._dial_directly, worker, self._settings.direct_timeout_s)
        )
        self._memory.reached(get_address_host(worker))
        return transport

    async def _with_secret(self, dial: Callable[[], Awaitable[Transport]]) -> Transport:
        """Dial; dial again if the worker refuses the known secrets and the scheduler has a new one."""
        known = self._keyring.marks
        if self._keyring.is_outdated:
            try:
                await self._renew(known)
            except (OSError, ActorLostError) as error:
                if not known:
                    raise
                logger.debug(
                    "The scheduler's secret could not be fetched (%s); dialling with older secrets", error
                )
        known = self._keyring.marks
        try:
            return await dial()
        except UntrustedPeerError:
            if not await self._renew(known):
                raise
        return await dial()

    async def _renew(self, known: Sequence[bytes]) -> bool:
        try:
            async with asyncio.timeout(SCHEDULER_TIMEOUT_S):
                return await self._keyring.renew(known)
        except ServeError as error:
            raise ActorLostError(str(error), begun=False) from error

    async def _dial_directly(self, worker: WorkerAddress, timeout_s: float) -> Transport:
        return await dial_worker(
            worker, timeout_s, keyring=self._keyring, connect=self._connect, **self._connection_args
        )

    async def _dial_through_scheduler(self, worker: WorkerAddress) -> Transport:
        scheduler = self._find_scheduler()
        if scheduler is None:
            raise OSError("the Dask client is closed")
        comm = await self._connect(scheduler, SCHEDULER_TIMEOUT_S, **self._connection_args)
        comm.name = f"daskserve channel to {worker}"
        message = {
            "worker": worker,
            "version": __version__,
            "protocol": PROTOCOL,
            "by_socket": is_plain_tcp(comm),
        }
        try:
            await comm.write({"op": SPLICE_OP, **message})
            answer = await comm.read()
            if answer is None:  # Dask's answer to an unknown operation
                raise ActorLostError("No daskserve instance runs on this Dask cluster.", begun=False)
            if "error" in answer:
                raise load_error(answer["error"])
        except BaseException:
            comm.abort()
            raise
        if answer["handshake"] is not None:
            # From now on, the other end of this connection is the worker.
            agree(comm, answer["handshake"])
        transport = await join_channel(
            comm, worker, SCHEDULER_TIMEOUT_S, self._keyring, by_socket=answer["by_socket"]
        )
        transport.is_relayed = True
        return transport
