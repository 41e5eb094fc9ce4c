"""The supervisor: a scheduler plugin that keeps the state shared by all instances on a cluster.

It keeps the registry of instances and Hosts, the stores, and the Dask client that holds the Hosts, so that
they outlive the programs that started them. It answers one scheduler operation (``daskserve``), whose
messages and answers are plain values. User code passes through it as bytes and is never unpickled here. It
makes no decisions about backends; the controller does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin

from daskserve.cluster.channel.connect.dialling import SPLICE_OP
from daskserve.cluster.dask.cluster import SUPERVISOR_OP, topic_of
from daskserve.cluster.dask.connection import connected
from daskserve.cluster.dask.encryption import as_client
from daskserve.cluster.dask.handlers import add_handler, remove_handler
from daskserve.cluster.distributed_internals import (
    answer_signal,
    close_client,
    is_running,
    publish,
    stop_answering_signal,
)
from daskserve.cluster.long_poll import ENDED, WORKERS
from daskserve.cluster.probe import check_caller
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.cluster.reserved_resources import ReservedResources
from daskserve.cluster.scheduler.capacity import Capacity
from daskserve.cluster.scheduler.controllers import (
    START_TIMEOUT_S,
    ControllerSupervisor,
    Instance,
    find_controller,
    list_instances,
)
from daskserve.cluster.scheduler.drains import Drains, end_as_asked
from daskserve.cluster.scheduler.evacuation import Evacuations
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.cluster.scheduler.http.api.handler import Api
from daskserve.cluster.scheduler.http.discovery import Targets
from daskserve.cluster.scheduler.http.page.handlers import Page
from daskserve.cluster.scheduler.http.panels.install import Panels
from daskserve.cluster.scheduler.http.site_guard import SiteGuard
from daskserve.cluster.scheduler.metrics import SupervisorMetrics
from daskserve.cluster.scheduler.owned_store import OwnedStore, owned_store
from daskserve.cluster.scheduler.parcels import parcel_verbs, verbs_for
from daskserve.cluster.scheduler.reconnect import (
    KnownInstance,
    ReconnectingInstances,
    check_reconnected,
    close_records,
    open_records,
)
from daskserve.cluster.scheduler.records import check_epoch, record_verbs
from daskserve.cluster.scheduler.sharing import share_instance
from daskserve.cluster.scheduler.splice import Splices
from daskserve.cluster.scheduler.topics import EndedTopics
from daskserve.cluster.store.opening import open_store
from daskserve.cluster.task_queues import InstanceTaskQueues
from daskserve.common.types import DEFAULT_INSTANCE, InstanceName, WorkerAddress
from daskserve.errors import (
    AlreadyRunningError,
    InstanceError,
    NotRunningError,
    ServeError,
    UnavailableError,
)
from daskserve.loops.tasks import TaskSet
from daskserve.payload.packed_errors import dump_error
from daskserve.telemetry.collector import PROCESS

logger = logging.getLogger("daskserve.supervisor")

PLUGIN_NAME = "daskserve-supervisor"
#: A supervisor without an instance unregisters after this time; the next start registers a new one.
UNUSED_S = 2.0
#: Number of cancelled starts that are remembered; each is needed for milliseconds only.
MAX_CANCELLED_STARTS = 100
#: How long an instance waits for its end after another cluster took its store over during its start.
REFUSED_S = 10.0


class Supervisor(SchedulerPlugin):
    """The scheduler plugin of daskserve.

    The first ``serve.start()`` registers it; it unregisters after the last ``shutdown()``.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self._instances: dict[InstanceName, Instance] = {}
        self._tasks = TaskSet(logger)
        self._is_closed = False
        self._client: Client | None = None
        self._watching: asyncio.Task[Any] | None = None
        self._unused: asyncio.TimerHandle | None = None

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        workers = {"kind": WORKERS, "joined": [], "left": []}
        reserved = ReservedResources(scheduler, lambda by: self._publish(None, {**workers, "taken": by}))
        self._hosts = HostRegistry(scheduler, reserved)
        self._splices = Splices(scheduler, self._hosts)
        self._topics = EndedTopics(scheduler, self._is_anywhere)
        self._capacity = Capacity(
            scheduler,
            lambda workers: self._evacuations.evacuate(workers),
            lambda workers: self._evacuations.stay(workers),
            became_adaptive=lambda: self._publish(None, {**workers, "is_adaptive": True}),
            has_instances=lambda: bool(self._instances),
        )
        guard = SiteGuard(scheduler)
        targets = Targets(scheduler, self._hosts.facts_of, guard)
        access = ControllerAccess(self._instances, self._hosts)
        api = Api(scheduler, access, guard)
        page = Page(scheduler, self._instances, access, api.feeds, guard, self._tasks.spawn)
        panels = Panels(scheduler, self._instances.keys, api.feeds.ask)
        #: The changes to the scheduler that apply while there are Hosts.
        self._installed = (self._capacity, reserved, targets.routes, api.routes, page, panels)
        self._controllers = ControllerSupervisor(
            self._hosts,
            self._instances,
            publish=self._publish,
            spawn=self._tasks.spawn,
            may_move=lambda: not self._capacity.is_adaptive,
        )
        self._lock = asyncio.Lock()
        self._evacuations = Evacuations(
            scheduler,
            self._hosts,
            self._instances,
            capacity=self._capacity,
            controllers=self._controllers,
            publish=self._publish,
            spawn=self._tasks.spawn,
            admit=self._admit,
        )
        #: Ids of ``serve.start()`` calls that were cancelled before they arrived here.
        self._cancelled_starts: deque[str] = deque(maxlen=MAX_CANCELLED_STARTS)
        self._drains = Drains(self._known, self._hosts.call, self._end_instance, self._tasks.spawn)
        self._reconnects = ReconnectingInstances(
            scheduler,
            self._instances,
            self._start_instance,
            self._drains.end_after,
            self._tasks.spawn,
            attempted=self._unregister_later,
        )
        self._verbs = {**self._make_verbs(), "targets": targets.describe}
        self._metrics = SupervisorMetrics(self._instances, self._hosts, guard)
        PROCESS.add(self._metrics)
        add_handler(scheduler, SUPERVISOR_OP, self.handle)
        add_handler(scheduler, SPLICE_OP, self._splices.accept)
        answer_signal(scheduler, self._hosts.abandon)
        # The program that registered the supervisor may be killed before it starts an instance.
        self._unregister_later()

    def _make_verbs(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return {
            "start_instance": self._start_instance,
            "bring_back": self._reconnects.bring_back,
            "drain_instance": self._drains.drain_instance,
            "end_instance": partial(end_as_asked, self._instances, self._end_instance),
            "share_instance": partial(share_instance, self._known, self._hosts),
            "controller": partial(find_controller, self._known),
            "instances": partial(list_instances, self._instances),
            "workers": self._describe_workers,
            "channel_secret": self._hosts.secret.reveal,
            **record_verbs(self._known),
            **parcel_verbs(lambda instance: self._known(instance).parcels),
            **verbs_for(lambda name: self._known(name).tasks, call_task_queue=InstanceTaskQueues.call),
            "report": self._report,
            "restart_worker": self._restart_worker,
            "leave": self._evacuations.leave,
            "depart": self._evacuations.depart,
            "inspect": self._hosts.inspect,
        }

    async def handle(
        self, verb: str, message: Mapping[str, Any], version: str, protocol: int | None = None
    ) -> dict[str, Any]:
        """Answer one verb; an error travels as bytes that the caller unpickles."""
        try:
            check_caller(self._scheduler.address, version, protocol)
            return {"value": await self._verbs[verb](**message)}
        except Exception as error:
            # Every error goes back to the caller, which raises it.
            return {"error": dump_error(error)}

    # Dask's events

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        if self._instances:
            self._tasks.spawn(self._admit(worker))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        if not is_running(scheduler):
            return
        self._hosts.forget(worker)
        self._splices.drop(worker)
        self._evacuations.forget(worker)
        for instance in list(self._instances.values()):
            self._publish(instance.name, {"kind": WORKERS, "joined": [], "left": [worker]})
            if instance.controller is not None and instance.controller.worker == worker:
                self._controllers.mark_lost(instance)
                self._tasks.spawn(self._controllers.start(instance))

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        held = self._capacity.held() | {
            each.controller.worker for each in self._instances.values() if each.controller is not None
        }
        return [worker for worker in workers if worker.address not in held]

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        for instance in self._instances.values():
            if instance.owner == client:
                instance.spare()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for instance in self._instances.values():
            if instance.owner == client and instance.grace is None and not instance.is_ending:
                logger.info(
                    "The owner of instance %s disconnected; the instance ends in %s s",
                    instance.name,
                    instance.grace_s,
                )
                self._drains.end_after(instance, instance.grace_s)

    # Verbs

    async def _start_instance(self, back: KnownInstance | None = None, **start: Any) -> dict[str, Any]:
        """Start an instance.

        ``start`` has the fields of `Instance`, the URL of its store, and the timeout for the first worker.

        Parameters
        ----------
        back
            The known state of an instance that has outlived another scheduler.
        """
        instance, start_id, store = start["instance"], start.get("start_id", ""), start["store"]
        if self._is_closed:
            raise NotRunningError("The supervisor unregistered after its last instance; register it again.")
        if start_id in self._cancelled_starts:
            raise InstanceError(f"The start of {instance!r} was cancelled before it began.")
        if instance in self._instances:
            if instance == DEFAULT_INSTANCE:
                raise AlreadyRunningError(
                    "A detached instance is already running on this cluster; use serve.connect() to reach "
                    "it, or connect and shut it down first."
                )
            raise AlreadyRunningError(f"An instance named {instance!r} is already running.")
        try:
            opened = owned_store(open_store(store, instance), start_id)
        except ServeError:
            await self._unregister_if_unused()
            raise
        entry = self._instances[instance] = Instance.started_by(start, opened)
        entry.is_back, has_records = back is not None, False
        self._topics.sweep()  # messages may have arrived after the end of an earlier instance
        try:
            try:
                await open_records(entry, store, back)
                has_records = True
                if isinstance(opened, OwnedStore):
                    entry.watching = self._tasks.spawn(self._watch_store(entry, opened))
                self._hosts.starts[instance] = start
                await self._hosts_ready(entry, start["timeout_s"])
                check_reconnected(entry, back)
                await self._hosts.entrust(instance)
                await self._controllers.start(entry)
            finally:
                entry.has_begun.set()
            if entry.controller is None and not entry.is_back:
                raise InstanceError(f"The controller of {instance!r} could not be started on any worker.")
        except BaseException:
            if entry.is_back and not has_records and not entry.is_ending:
                # Its actors keep serving, and their workers ask for it again: the store may be repaired in
                # time.
                await close_records(entry)
                self._instances.pop(instance, None)
            else:
                # By its start id, because another instance may have taken the same name.
                await self._end_instance(instance, start_id)
            raise
        return {"controller": entry.controller and asdict(entry.controller)}

    async def _watch_store(self, entry: Instance, store: OwnedStore) -> None:
        await store.watch()
        # Another cluster took the store first. The program that started this instance ends it, unless it has
        # died.
        await asyncio.sleep(REFUSED_S)
        await self._end_instance(entry.name, entry.start_id)

    async def _end_instance(self, instance: InstanceName, start_id: str | None = None) -> bool:
        """End an instance; return whether it no longer runs.

        With a ``start_id``, end it only if that call of ``serve.start()`` started it.
        """
        entry = self._instances.get(instance)
        if start_id is not None and (entry is None or start_id != entry.start_id):
            # The start to undo may still be in flight, because this call can overtake it.
            self._cancelled_starts.append(start_id)
        if entry is None:
            # This is reached if a program is interrupted after registering the supervisor and before the
            # start.
            await self._unregister_if_unused()
            return True
        if start_id is not None and start_id != entry.start_id:
            return False
        if entry.ending is None:
            entry.is_ending = True
            entry.ending = self._tasks.spawn(self._end(entry))
        await asyncio.shield(entry.ending)
        return True

    async def _end(self, entry: Instance) -> None:
        entry.spare()
        if entry.draining is not None:
            entry.draining.cancel()
        self._publish(entry.name, {"kind": ENDED})
        if entry.awaiting_hosts is not None:
            entry.awaiting_hosts.cancel()
        await self._hosts.end_instance(entry.name)
        if entry.starting.locked() or not entry.has_begun.is_set():
            # This tells a running start of the instance or of its controller that the instance is ending.
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await entry.has_begun.wait()
                    async with entry.starting:
                        pass
            except TimeoutError:
                logger.warning("Instance %s ended while its store or a worker did not answer", entry.name)
            await self._hosts.end_instance(entry.name)
        self._topics.sweep()
        self._capacity.forget(entry.name)
        self._hosts.reserved.forget(entry.name)
        self._evacuations.wake()
        await close_records(entry)
        async with self._lock:
            self._instances.pop(entry.name, None)
        await self._unregister_if_unused()

    async def _describe_workers(self, instance: InstanceName) -> dict[str, Any]:
        entry = self._instances.get(instance)
        if entry is None or not entry.epoch:
            # Not all Hosts are open yet, and a controller that outlived another scheduler would treat their
            # workers as lost.
            raise UnavailableError(
                f"Instance {instance!r} has no controller of this scheduler yet; try again."
            )
        return {"workers": self._hosts.infos(), "refused": self._hosts.refused()}

    async def _restart_worker(self, instance: InstanceName, epoch: int, worker: WorkerAddress) -> None:
        check_epoch(self._known(instance), epoch)
        await self._hosts.restart(worker)

    async def _report(self, instance: InstanceName, epoch: int, **fields: Any) -> bool:
        entry = self._known(instance)
        if epoch == entry.epoch:
            report = UsageReport.of(fields)
            entry.proxies = report.proxies
            self._capacity.report(instance, report)
            self._hosts.reserved.reserve(instance, report)
            self._evacuations.wake()
        return self._capacity.is_adaptive

    def _known(self, instance: InstanceName) -> Instance:
        entry = self._instances.get(instance)
        if entry is None or entry.is_ending:
            self._reconnects.check(instance)
            raise NotRunningError(
                f"Instance {instance!r} does not run on this cluster; start one with serve.start()."
            )
        return entry

    # Acting

    async def _hosts_ready(self, entry: Instance, timeout_s: float) -> None:
        async def ready() -> None:
            await self._capacity.wait_for_worker(timeout_s)
            await self._hosts.ready(timeout_s)

        async with self._lock:
            if self._client is None:
                client = Client(
                    self._scheduler.address,
                    asynchronous=True,
                    set_as_default=False,
                    security=as_client(self._scheduler.security, "scheduler"),
                    direct_to_workers=True,
                    name=PLUGIN_NAME,
                )
                await connected(client)
                self._client = client
                self._hosts.open(client)
                for each in self._installed:
                    each.install()
                self._watching = self._tasks.spawn(self._controllers.watch())
        if not entry.is_ending:
            waiting = entry.awaiting_hosts = asyncio.create_task(ready())
            await asyncio.wait({waiting})
            if not entry.is_ending:
                return await waiting
        raise InstanceError(f"Instance {entry.name!r} was ended while it was being started.")

    async def _admit(self, worker: WorkerAddress) -> None:
        if self._client is None or self._client.status != "running":
            return
        if await self._hosts.admit(worker):
            self._publish(None, {"kind": WORKERS, "joined": self._hosts.infos(worker), "left": []})
            for entry in list(self._instances.values()):
                if entry.controller is None and not entry.is_ending and entry.epoch:
                    self._tasks.spawn(self._controllers.start(entry))

    def _publish(self, instance: InstanceName | None, message: Mapping[str, Any]) -> None:
        """Publish plain values on an instance's topic; None publishes on all instances' topics."""
        for name in list(self._instances) if instance is None else [instance]:
            publish(self._scheduler, topic_of(name), message)

    def _is_anywhere(self, instance: InstanceName) -> bool:
        # Once this supervisor is closed, another supervisor may run an instance of this name.
        current = self._scheduler.plugins.get(PLUGIN_NAME)
        return isinstance(current, Supervisor) and current.is_running(instance)

    def is_running(self, instance: InstanceName) -> bool:
        """Return whether an instance of this name runs and is not ending."""
        return instance in self._instances and not self._instances[instance].is_ending

    def _unregister_later(self) -> None:
        """Unregister after a delay, unless there is an instance by then."""
        if self._unused is not None:
            self._unused.cancel()
        self._unused = asyncio.get_running_loop().call_later(
            UNUSED_S, lambda: self._tasks.spawn(self._unregister_if_unused())
        )

    async def _unregister_if_unused(self) -> None:
        async with self._lock:
            if not self._instances and not self._reconnects.are_pending and not self._is_closed:
                await self.close()

    async def close(self) -> None:
        """Undo `start` and `_hosts_ready`; only the secret of its cluster stays in the scheduler."""
        self._is_closed = True
        self._evacuations.close()
        PROCESS.remove(self._metrics)
        for instance in self._instances:  # left only if the scheduler itself is closing
            PROCESS.forget(instance)
        if self._unused is not None:
            self._unused.cancel()
        for each in self._installed:
            each.uninstall()
        if self._watching is not None:
            self._watching.cancel()
        remove_handler(self._scheduler, SUPERVISOR_OP)
        remove_handler(self._scheduler, SPLICE_OP)
        stop_answering_signal(self._scheduler)
        self._splices.close()
        if PLUGIN_NAME in self._scheduler.plugins:
            self._scheduler.remove_plugin(PLUGIN_NAME)
        if self._client is not None:
            client, self._client = self._client, None
            if is_running(self._scheduler):
                await self._hosts.close()
            await close_client(client)
