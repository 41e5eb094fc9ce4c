"""The Host: the one Dask actor of a worker, which contains daskserve's own actors.

Problem: creating an actor with ``submit`` waits for a free task thread, possibly behind long batch work.
Choice: submit one Host per worker, once, and create controller, proxies and replicas inside it with an
asynchronous call, which takes milliseconds on a worker whose threads are all busy.

The Host is the interface to Dask; an `ActorRegistry` holds its actors. It owns the objects that a process has
once: the Dask client, the channels, and one `DaskCluster` per instance. All state is in this object and none
in a module, because test clusters run several workers in one process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client, Worker, get_worker

from daskserve._version import __version__
from daskserve.cluster.actors.factories import load_factories
from daskserve.cluster.actors.recent_log import RecentLog
from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.channel.connect.dialling import CHANNEL_OP
from daskserve.cluster.channel.connect.keyring import ChannelSecret
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.dask.encryption import as_client
from daskserve.cluster.dask.handlers import add_handler, remove_handler
from daskserve.cluster.dask.shared_values import ValueVerbs
from daskserve.cluster.distributed_internals import NO_REPLY, as_current, close_client
from daskserve.cluster.metrics_path import facts_of_server
from daskserve.cluster.protocols.base import ActorContext, ActorSpec, HostedActor
from daskserve.cluster.worker.interpreter import InterpreterTuning
from daskserve.cluster.worker.log_thread import LogThread
from daskserve.cluster.worker.nannies import HOST_ATTRIBUTE
from daskserve.cluster.worker.reconnect import Reconnection
from daskserve.cluster.worker.retirement import Retirement
from daskserve.cluster.worker.tagging import mark_output
from daskserve.cluster.worker.user_clients import UserClients
from daskserve.cluster.worker.worker_view import CurrentClient, WorkerView
from daskserve.common import settings
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorKind, InstanceName
from daskserve.errors import UnavailableError
from daskserve.internals.child_processes import ChildProcesses
from daskserve.loops.forks import ForkGuard
from daskserve.payload.packed_errors import dump_error
from daskserve.telemetry.collector import PROCESS

logger = logging.getLogger("daskserve.host")


def current_host() -> Host:
    """Return the Host of the current worker if it has outlived its scheduler; otherwise a new one."""
    host: Host | None = getattr(get_worker(), HOST_ATTRIBUTE, None)
    return Host() if host is None else host


def is_own_process(worker: Worker) -> bool:
    """Return whether a worker's process belongs to it alone; call this on the worker's loop.

    The workers of ``LocalCluster(processes=False)`` live in the user's process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not worker.address.startswith("inproc://")


class Host:
    """One per worker. Every method is ``async``: plain ones would share Dask's single actor thread."""

    def __init__(self) -> None:
        self._worker = get_worker()
        self._tuning = InterpreterTuning(self._has_replicas)
        recent = RecentLog()
        self._logs = LogThread(recent=recent)
        self._unmark_output: Callable[[], None] = lambda: None
        self._forks = ForkGuard(self._peers)
        self._children = ChildProcesses()
        #: Dask's clients for user code; None until `open`.
        self._user_clients: UserClients | None = None
        view = WorkerView(self._worker, self._worker.scheduler.address, self._find_user_client)
        current_client = CurrentClient(self._find_user_client)
        #: The connection of this worker's process; None until `open`.
        self.connection: DaskConnection | None = None
        self.registry = ActorRegistry(
            self._worker.address,
            os.getpid(),
            LoopClock(),
            self._make,
            # User code in an actor finds this worker with Dask's own get_worker() and get_client().
            surroundings=lambda: as_current(view, current_client),
            on_change=self._tuning.objects_changed,
            broken_routes=lambda instance: self._open_connection.cluster(instance).routes.broken(),
            recent_log=recent,
            logs=self._logs.logs,
            parts=(ValueVerbs(self._worker),),
        )
        self._reconnection = Reconnection(self._worker, self.registry, settings.scheduler().grace_s)
        grace_s = settings.process().termination_grace_s
        self.retirement = Retirement(self._worker, self.registry, LoopClock(), grace_s)
        # Imported here, in a task thread, so that the event loop is not blocked and later deploys need not
        # wait.
        self._factories = load_factories()

    async def open(
        self, starts: Mapping[InstanceName, Mapping[str, Any]], secret: ChannelSecret
    ) -> dict[str, Any]:
        """Connect to the scheduler and start answering channels; idempotent.

        A Host that has outlived its scheduler ends the controllers from before.

        Parameters
        ----------
        starts
            The messages that start the instances on the cluster; see `entrust`.
        secret
            The secret that processes must know to open channels to this worker.
        """
        if self.connection is not None:
            self.connection.channels.learn(secret)
            await self.registry.end_controllers()
        else:
            client = Client(
                self._worker.scheduler.address,
                asynchronous=True,
                set_as_default=False,
                security=as_client(self._worker.security, "worker"),
                direct_to_workers=True,
                name="daskserve-host",
            )
            self.connection = DaskConnection(
                client, role="worker", worker=self._worker, registry=self.registry
            )
            self.connection.channels.learn(secret)
            # `close` may be called during the first await, so everything that it undoes is done before.
            add_handler(self._worker, CHANNEL_OP, self._accept)
            self._reconnection.open(self.connection, self.retirement.complete)
            setattr(self._worker, HOST_ATTRIBUTE, self)
            self._user_clients = UserClients(
                self._worker.scheduler.address,
                as_client(self._worker.security, "worker"),
                self.connection.loop,
            )
            self._tuning.open()
            has_process = is_own_process(self._worker)
            if has_process:
                self._forks.open()
                self._children.open()
                if settings.process().log_thread:
                    self._logs.open()
                    self._unmark_output = mark_output(self._logs.logs, self._logs.take_print)
                    PROCESS.add(self._logs.logs)
            await asyncio.gather(client, self.retirement.open(has_process=has_process))
        self._reconnection.starts.update(starts)
        return {"pid": os.getpid(), "version": __version__, **facts_of_server(self._worker)}

    async def entrust(self, instance: InstanceName, start: Mapping[str, Any]) -> None:
        """Keep the start message of an instance, to bring the instance back on the next scheduler."""
        self._reconnection.starts[instance] = start

    async def _accept(self, comm: Any, by_socket: bool) -> Any:
        await self._open_connection.channels.accept(comm, by_socket=by_socket)
        return NO_REPLY

    @property
    def _open_connection(self) -> DaskConnection:
        if self.connection is None:
            raise self._not_open()
        return self.connection

    def _not_open(self) -> UnavailableError:
        return UnavailableError(f"The Host on {self._worker.address} is not open.")

    async def call(self, name: str, incarnation: int, verb: str, message: dict[str, Any]) -> dict[str, Any]:
        """Call a verb for the supervisor; return errors as bytes, because foreign ones may not unpickle."""
        try:
            return {"value": await self.registry.call(name, incarnation, verb, message)}
        except Exception as error:
            # Every error goes back to the caller, which raises it.
            return {"error": dump_error(error)}

    async def end_instance(self, instance: InstanceName) -> None:
        """Stop an instance's actors and forget the instance."""
        self._reconnection.starts.pop(instance, None)
        await self.registry.drain(0.0, instance)
        await self._open_connection.drop_cluster(instance)
        PROCESS.forget(instance)

    async def close(self) -> None:
        """Stop all actors and remove everything that daskserve added to the worker."""
        for instance in {entry.spec.instance for entry in self.registry.entries.values()}:
            await self.end_instance(instance)
        remove_handler(self._worker, CHANNEL_OP)
        self._tuning.close()
        self._forks.close()
        self._children.close()
        self._unmark_output()
        PROCESS.remove(self._logs.logs)
        await asyncio.to_thread(self._logs.close)
        if self.connection is not None:
            self._reconnection.close()
            self.retirement.close()
            delattr(self._worker, HOST_ATTRIBUTE)
            connection, self.connection = self.connection, None
            if self._user_clients is not None:
                await self._user_clients.close()
            await connection.close()
            await close_client(connection.client)

    def _find_user_client(self) -> Client:
        if self._user_clients is None:
            raise self._not_open()
        return self._user_clients.current()

    def _peers(self) -> list[str]:
        channels = [] if self.connection is None else list(self.connection.channels.peers)
        return [self._worker.scheduler.address, *channels]

    def _has_replicas(self) -> bool:
        return any(entry.spec.kind is ActorKind.REPLICA for entry in self.registry.entries.values())

    def _make(self, spec: ActorSpec) -> HostedActor:
        connection = self._open_connection
        cluster = connection.cluster(spec.instance)
        context = ActorContext(
            spec,
            cluster,
            connection.clock,
            connection.rng,
            self._worker.address,
            connection.inbox,
            logs=self._logs.logs if self._logs.is_open else None,
        )
        return self._factories[spec.kind](context)
