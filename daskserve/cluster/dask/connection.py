"""The connection: one process's connection to a Dask cluster, shared by all instances it uses.

A connection runs on one event loop, which is the loop of its Dask client. User code calls it from other
threads through `DaskConnection.sync`, and from any event loop through `DaskConnection.wait`. In a worker, the
Host owns the connection. In a user program, the connection is an attribute of its `distributed.Client`, so
that it ends with the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from distributed import Client, Security, SpecCluster, Status, Worker
from distributed.comm import connect

from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.channel.connect.dialling import Dialler
from daskserve.cluster.channel.connect.keyring import Keyring
from daskserve.cluster.channel.pool import ChannelPool, refuse_requests
from daskserve.cluster.dask.cluster import DaskCluster, ask_if_supervised, ask_supervisor
from daskserve.cluster.dask.reconnect import identity_on, keep_connected
from daskserve.cluster.dask.tasks import current_task
from daskserve.cluster.dask.values import DaskTransfer
from daskserve.cluster.distributed_internals import (
    actors_on,
    call_before_close,
    call_when_closed,
    close_client,
    configured_security,
    is_asynchronous,
    leave_folders,
    release_loop,
    scheduler_address,
)
from daskserve.cluster.probe import mismatch, silence_probe, version_probe
from daskserve.cluster.protocols.ended import ended_error, forked_error
from daskserve.cluster.protocols.started import StartedInstances
from daskserve.common import settings
from daskserve.common.clock import OneLoopClock, RequestIds, system_rng
from daskserve.common.formatting import shown
from daskserve.common.types import InstanceName
from daskserve.errors import (
    BlockingCallError,
    ClusterUnreachableError,
    ServeError,
    VersionMismatchError,
)
from daskserve.loops.at_fork import call_in_forks
from daskserve.loops.blocking import settled
from daskserve.loops.event_loop import on_loop, running_loop
from daskserve.loops.tasks import TaskSet
from daskserve.loops.thread_calls import CallInbox, LoopQueues
from daskserve.telemetry.collector import PROCESS

T = TypeVar("T")

logger = logging.getLogger("daskserve.connection")

_ATTRIBUTE = "_daskserve_connection"
#: Time limit for closing the channels, or the Dask client; a program that ends waits for it.
CLOSE_S = 10.0
#: Added to the timeout, so that Dask's own, more specific error is raised first if nothing listens.
CONNECT_MARGIN_S = 0.2


class _InterruptibleCall(Generic[T]):
    """A coroutine that another thread waits for and may cancel at any moment.

    Ctrl-C may arrive between scheduling the coroutine and receiving the future with which to cancel it.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self.is_given_up = False

    async def run(self) -> T:
        if self.is_given_up:
            self._coroutine.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._coroutine

    def cancel(self) -> None:
        """Cancel the coroutine if it runs; call on the loop only."""
        if self._task is not None:
            self._task.cancel()


class DaskConnection:
    """One process's connection to a Dask cluster; see the module.

    Parameters
    ----------
    client : distributed.Client
    worker, registry
        In a worker: the worker and its actors.
    """

    def __init__(
        self,
        client: Client,
        *,
        role: str = "client",
        worker: Worker | None = None,
        registry: ActorRegistry | None = None,
    ) -> None:
        self.client = client
        # Tornado's IOLoop type does not declare that every IOLoop wraps an asyncio loop.
        io_loop: Any = client.loop
        #: The event loop that this connection runs on.
        self.loop: asyncio.AbstractEventLoop = io_loop.asyncio_loop
        self.clock = OneLoopClock(self.loop)
        #: Calls to event loops: this connection's own, and those of its callers.
        self.loop_queues = LoopQueues()
        self.inbox = CallInbox(self.loop)
        self.thread_calls = self.loop_queues.get(self.loop, self.inbox)
        self.rng = system_rng()
        self.request_ids = RequestIds(self.rng)
        channel = settings.channel() if worker is None else settings.worker_channel()
        connection_args = client.security.get_connection_args(role)
        keyring = Keyring(partial(ask_supervisor, client, "channel_secret"))
        dialler = Dialler(connection_args, lambda: scheduler_address(client), channel, self.clock, keyring)
        kept = None if registry is None else registry.kept
        self.channels = ChannelPool(
            refuse_requests if registry is None else registry.dispatch,
            dialler.dial,
            self.inbox,
            keyring=keyring,
            lost_after_s=channel.lost_after_s,
            connect_directly=None if channel.route == "scheduler" else dialler.dial_directly,
            retry_direct_s=channel.retry_direct_s,
            on_silent=dialler.note_silence,
            kept=kept,
        )
        PROCESS.add(self.channels)
        self.values = DaskTransfer(client, self.channels.request, worker, kept)
        #: The worker of this process; None in a program.
        self.worker = worker
        self._registry = registry
        self._clusters: dict[InstanceName, DaskCluster] = {}
        self.started = StartedInstances(self.owner_id, self.ask)
        self._tasks = TaskSet(logger)
        #: Detached instances whose Dask cluster was created for them and ends with them.
        self.owning_instances: set[InstanceName] = set()
        #: Whether daskserve created the Dask client, to connect to a scheduler in another process.
        self.owns_client = False
        #: Makes the error of later calls if the connection did not end by closing the Dask client.
        self._end_error: Callable[[], ServeError] | None = None
        #: The client's `InstanceConnection` that `serve.run` reuses; None if there is none.
        self.default_instance: Any = None
        self._address = "an unknown scheduler"
        call_in_forks(self._forked)
        keep_connected(
            client,
            connection_args,
            lambda: (keyring.resume, *(each.resume for each in self._clusters.values())),
            self.clock,
        )

    @property
    def owner_id(self) -> str:
        """The id of this process's Dask client, by which the scheduler identifies the process."""
        return str(self.client.id)

    @property
    def scheduler_address(self) -> str:
        self._address = scheduler_address(self.client) or self._address
        return self._address

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if the scheduler has none."""
        services = self.client.scheduler_info(n_workers=0).get("services", {})
        return str(self.client.dashboard_link) if services.get("dashboard") else None

    def cluster(self, instance: InstanceName) -> DaskCluster:
        """Return this process's view of an instance, created on first use and again once it has ended."""
        known = self._clusters.get(instance)
        if known is not None and known.is_ended:
            # Another instance of that name may run now. The old view, which handles may hold, must
            # unsubscribe from the topic before the new one subscribes.
            self.loop.call_soon_threadsafe(self.spawn, known.close())
        if known is None or known.is_ended:
            self._clusters[instance] = DaskCluster(
                instance,
                self.client,
                self.channels,
                clock=self.clock,
                connection=self,
                local_worker=self.worker,
                registry=self._registry,
            )
        return self._clusters[instance]

    async def drop_cluster(self, instance: InstanceName) -> None:
        """Forget an instance."""
        cluster = self._clusters.pop(instance, None)
        if cluster is not None:
            await cluster.close()

    def sync(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine on the connection's loop and return its result to this thread.

        Raises
        ------
        BlockingCallError
            The caller is on the loop that would have to run the coroutine.
        ClusterUnreachableError
            The Dask client was closed.
        """
        if self.runs_here():
            coroutine.close()
            raise BlockingCallError(
                "A blocking daskserve call was made on the event loop that would have to run it; await its "
                "asynchronous form, or call it from another thread (asyncio.to_thread)."
            )
        if self.is_closed:
            coroutine.close()
            raise self.closed_error()
        call = _InterruptibleCall(coroutine)
        try:
            return asyncio.run_coroutine_threadsafe(call.run(), self.loop).result(timeout_s)
        except BaseException:
            # Cancel also on Ctrl-C, so that the call does not continue in the background.
            call.is_given_up = True
            with suppress(RuntimeError):  # the loop was closed in the meantime, which ended the call
                self.loop.call_soon_threadsafe(call.cancel)
            raise

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop and return its result to a coroutine on any loop.

        Raises
        ------
        ClusterUnreachableError
            The Dask client was closed.
        """
        if self.is_closed:
            coroutine.close()
            raise self.closed_error()
        return await on_loop(self.loop, coroutine)

    @property
    def is_closed(self) -> bool:
        """Whether the Dask client has been closed."""
        return self.client.status in ("closing", "closed")

    def closed_error(self) -> ServeError:
        """Return the error to raise if `is_closed`."""
        if self._end_error is not None:
            return self._end_error()
        return ClusterUnreachableError(
            f"The Dask client of {self.scheduler_address} is closed, which closed daskserve's connection; "
            "create a new distributed.Client, and start or connect with it."
        )

    #: Returns the Dask task that the caller's code belongs to; None elsewhere.
    current_task = staticmethod(current_task)

    def runs_here(self) -> bool:
        """Return whether the caller is on the connection's own loop."""
        return running_loop() is self.loop

    async def ask(self, verb: str, **message: Any) -> Any:
        """Call a verb of the supervisor; see `daskserve.cluster.dask.cluster.ask_supervisor`."""
        ask = ask_if_supervised if self.worker is None else ask_supervisor
        return await ask(self.client, verb, **message)

    async def check_scheduler(self, timeout_s: float) -> bool:
        """Check the scheduler's daskserve; return whether a supervisor runs there.

        Raises
        ------
        VersionMismatchError
            The scheduler has no daskserve, or another version.
        """
        try:
            # Not wait_for: up to Python 3.11, it sometimes swallows a cancellation.
            async with asyncio.timeout(timeout_s):
                found: Mapping[str, Any] = await self.client.run_on_scheduler(version_probe())
        except (OSError, TimeoutError) as error:
            raise ClusterUnreachableError(
                f"The Dask scheduler at {self.scheduler_address} did not answer: {error!r}"
            ) from error
        problem = mismatch(f"The scheduler {self.scheduler_address}", found)
        if problem is not None:
            raise VersionMismatchError(problem)
        return bool(found["is_supervised"])

    async def silences(self) -> Mapping[str, float]:
        """Return for how many seconds the scheduler has heard nothing of each worker."""
        found: Mapping[str, float] = await self.client.run_on_scheduler(silence_probe())
        return found

    @property
    def is_open(self) -> bool:
        """Whether the Dask client is connected to its scheduler, and its event loop runs."""
        return bool(self.client.status == "running" and self.loop.is_running())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on this loop without waiting for it; call on the loop only."""
        self._tasks.spawn(coroutine)

    async def instance_ended(self, instance: InstanceName, *, asynchronous: bool) -> None:
        """Close the cluster or client that daskserve created, if this was the connection's last instance."""
        self.started.forget(instance)
        if self.runs_here() and not is_asynchronous(self.client):
            return  # Dask can stop the thread of this loop only from another thread
        # A cluster that was created only for this instance ends with it.
        ends_scheduler = instance in self.owning_instances
        self.owning_instances.discard(instance)
        cluster = self.started.take_cluster()
        # A blocking program may reuse a client that was created for it: Dask closes it when the program ends.
        ends_client = self.owns_client and not self.started and is_asynchronous(self.client)
        if ends_scheduler or ends_client or cluster is not None:
            self._end_error = ended_error  # the Dask client is closed with the program's last instance
            await self._close_client(cluster, ends_scheduler=ends_scheduler, asynchronous=asynchronous)

    async def _close_client(
        self, cluster: Any = None, *, ends_scheduler: bool = False, asynchronous: bool
    ) -> None:
        """Close the connection and its Dask client, and the scheduler or the cluster object if given."""

        async def close() -> None:
            if self.is_open:
                await self.close()
                if ends_scheduler:
                    await settled(self.client.shutdown())
                await close_client(self.client, timeout=CLOSE_S)
            if cluster is not None:
                await cluster.close()

        def close_blocking() -> None:
            if self.is_open:
                with suppress(TimeoutError):
                    self.sync(self.close(), timeout_s=CLOSE_S)
                    if ends_scheduler:
                        self.client.shutdown()
                        release_loop(self.client)
                    else:
                        self.client.close(timeout=CLOSE_S)
            if cluster is not None:
                cluster.close()

        if not is_asynchronous(self.client):
            await asyncio.to_thread(close_blocking) if asynchronous else close_blocking()
        elif asynchronous:
            await on_loop(self.loop, close())
        elif self.loop.is_running():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(close(), self.loop).result(2 * CLOSE_S)

    def release_default(self, instance: InstanceName) -> None:
        """Clear the default instance if it is this one."""
        if self.default_instance is not None and self.default_instance.instance == instance:
            self.default_instance = None

    async def disconnect(self, instance: InstanceName = "", *, asynchronous: bool) -> None:
        """Close the connection. Close its Dask client too if daskserve created it and nothing else needs
        it."""
        self.started.forget(instance)
        if self.owns_client and self.is_open and not self.started:
            await self._close_client(asynchronous=asynchronous)

    def follow_client(self) -> None:
        """End this connection when the Dask client closes; the client's loop may keep running."""
        call_before_close(self.client, self.started.end_owned)
        call_when_closed(self.client, self._release)

    def _forked(self) -> None:
        # The thread of the loop is not in this process. Dask's functions at exit would wait for it forever.
        self._end_error = partial(
            forked_error,
            f"Connect here, with serve.connect(address={self.scheduler_address!r}), and use its handles; or "
            "start processes with the method 'spawn'.",
        )
        self.client.status = "closed"
        if isinstance(self.client.cluster, SpecCluster):
            self.client.cluster.status = Status.closed
        leave_folders()

    def _release(self) -> None:
        self.channels.abort()
        PROCESS.remove(self.channels)

    async def close(self) -> None:
        """Close the channels and views, but not the Dask client."""
        for instance in list(self._clusters):
            await self.drop_cluster(instance)
        await self.channels.close()
        PROCESS.remove(self.channels)


def connection_of(client: Client) -> DaskConnection:
    """Return the connection of a Dask client, created on first use."""
    connection: DaskConnection | None = getattr(client, _ATTRIBUTE, None)
    if connection is None:
        connection = DaskConnection(client)
        connection.follow_client()
        logger.debug("daskserve uses Dask client %s of %s", client.id, connection.scheduler_address)
        setattr(client, _ATTRIBUTE, connection)
    return connection


def connection_on(worker: Any) -> DaskConnection | None:
    """Return the connection of the Host on a worker of this process; None if there is none."""
    found = (getattr(actor, "connection", None) for actor in actors_on(worker))
    return next((each for each in found if isinstance(each, DaskConnection)), None)


async def dial(address: str, timeout_s: float, *, asynchronous: bool) -> DaskConnection:
    """Connect to a Dask scheduler.

    Raises
    ------
    ClusterUnreachableError
        No Dask scheduler answers at the address.
    """
    # The same security that Dask's own client would find.
    security: Any = configured_security(address)
    checking = _check_is_scheduler(address, timeout_s, security)
    try:
        if asynchronous:
            await checking
        else:
            # In a separate thread, because the caller may be on an event loop.
            with ThreadPoolExecutor(1, "daskserve-dial") as threads:
                threads.submit(asyncio.run, checking).result()
        client = Client(address, timeout=timeout_s, security=security, asynchronous=asynchronous)
        if asynchronous:
            await connected(client)
    except (OSError, ValueError, TypeError) as error:
        needs_tls = address.startswith("tls:") and security.tls_client_cert is None
        hint = (
            " With TLS, set Dask's distributed.comm.tls.* or pass dask_client=distributed.Client(address, "
            "security=...)."
        )
        raise ClusterUnreachableError(
            f"No Dask scheduler answers at {address!r} ({error}); pass the address of a running scheduler, "
            f"such as tcp://host:8786.{hint if needs_tls else ''}"
        ) from error
    connection = connection_of(client)
    connection.owns_client = True
    return connection


async def connected(client: Client) -> None:
    """Return when an asynchronous Dask client is connected; close it if that fails or is cancelled."""
    try:
        await client
    except BaseException:
        await close_client(client)
        raise


async def _check_is_scheduler(address: str, timeout_s: float, security: Security) -> None:
    # Dask's own client waits forever for a server that accepts the connection and never answers. It also
    # leaks a half-open client if the server is not a scheduler.
    try:
        async with asyncio.timeout(timeout_s + CONNECT_MARGIN_S):
            comm = await connect(address, timeout=timeout_s, **security.get_connection_args("client"))
            try:
                answer = await identity_on(comm)
            finally:
                comm.abort()
    except TimeoutError as error:
        raise OSError(
            f"the server there did not answer in Dask's protocol within {shown(timeout_s)} s"
        ) from error
    if answer.get("type") != "Scheduler":
        raise OSError("the server there is not a Dask scheduler")
