"""The core of a controller: its life, its view of the workers, and the one way in which anything changes.

That way is `daskserve.control.writing.Writer`: write to the store as one transaction, apply, tell.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from daskserve.clock import Clock
from daskserve.cluster.base import ActorContext, Cluster, Verb, verbs_of
from daskserve.cluster.long_poll import WORKERS, LongPollHost
from daskserve.control import backend_state, checkpoint, endpoint_state
from daskserve.control.acting import Acting
from daskserve.control.observed import Observed
from daskserve.control.reconcile import Reconciler
from daskserve.control.records import Change, GoalRecord, GoalState, ProxyRecord
from daskserve.control.scaling.scaler import Scaler
from daskserve.control.state import State
from daskserve.control.watch import WorkerWatch
from daskserve.control.writing import Writer
from daskserve.errors import InstanceError, ServeError, StaleEpochError
from daskserve.figures.table import MetricSample
from daskserve.options.config import HTTPOptions
from daskserve.starts import ControllerStart, ProxyStart
from daskserve.types import Location, SnapshotId, WorkerInfo

logger = logging.getLogger("daskserve.controller")

#: A proxy gets this long to say that it acts on a change.
MAX_WAIT_S = 30.0
#: The worker list is fetched whole this often, in case an event was lost.
REFRESH_S = 30.0


class ControllerCore:
    """One per instance. ``context.spec.incarnation`` is its epoch."""

    def __init__(self, context: ActorContext) -> None:
        self._cluster: Cluster = context.cluster
        self._clock: Clock = context.clock
        self._rng: random.Random = context.rng
        self._epoch = context.spec.incarnation
        self._worker = context.worker
        self._start = ControllerStart.decode(context.spec.payload)
        self._http = HTTPOptions(**self._start.http.model_dump())
        self._news = LongPollHost(self._epoch, self._cluster.publish, self._clock)
        self._state = State()
        self._observed = Observed()
        self._goal_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._reconciler: Reconciler | None = None
        self._watch: WorkerWatch | None = None
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._events = 0

    @property
    def verbs(self) -> Mapping[str, Verb]:
        return verbs_of(self)

    # Lifecycle

    async def start(self) -> dict[str, Any]:
        """Take over whatever the store holds and begin to reconcile it with what runs."""
        records = await self._cluster.store.load()
        self._state, corrupt = checkpoint.restore(records)
        self._corrupt = corrupt
        for key, error in corrupt.items():
            logger.error("Stored record %s is left aside: %s", key, error)
        self._writer = Writer(self._cluster.store, self._epoch, self._state, self._apply)
        location = self._http.location if self._http.has_proxies else Location.NO_SERVER
        self._acting = Acting(
            self._cluster,
            self._clock,
            self._state,
            self._observed,
            commit=self._writer.commit,
            lock=self._writer,
            proxy_start=self._proxy_start,
            poke=self._poke,
            debug=self._http.debug,
            start_timeout_s=self._start.start_timeout_s,
        )
        self._reconciler = Reconciler(
            self._state,
            self._observed,
            self._acting,
            self._clock,
            self._rng,
            commit=self._writer.commit,
            lock=self._writer,
            worker=self._worker,
            location=location,
            port=self._http.port,
            epoch=self._epoch,
        )
        self._scaler = Scaler(self._state, self._observed, self._clock, poke=self._reconciler.poke)
        self._unsubscribe = await self._cluster.subscribe(self._hear)
        await self._refresh_workers()
        self._notify(self._all_keys())
        self._watch = WorkerWatch(
            self._cluster,
            self._clock,
            self._state,
            self._observed,
            poke=self._reconciler.poke,
            epoch=self._epoch,
        )
        self._tasks = [
            asyncio.create_task(self._watch.run(), name="daskserve-watch-workers"),
            asyncio.create_task(self._reconciler.run(), name="daskserve-reconcile"),
            asyncio.create_task(self._keep_refreshing(), name="daskserve-refresh"),
            asyncio.create_task(self._scaler.run(), name="daskserve-scale"),
        ]
        self._reconciler.figures.started_at = self._clock.wall()
        return {"epoch": self._epoch}

    def samples(self) -> list[MetricSample]:
        """Return the figures as metrics; see `daskserve.figures.collector.Source`."""
        if self._reconciler is None:
            return []
        figures = self._reconciler.figures
        counts = figures.counts(self._cluster.instance)
        # One that has ended, or has been replaced, knows nothing of the present.
        if not self._tasks or any(task.done() for task in self._tasks):
            return counts
        return counts + figures.states(self._cluster.instance, self._epoch, self._state, self._observed)

    async def stop(self, grace_s: float) -> None:
        """End the loop. What it started goes on: actors are ended by their Hosts."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        self._tasks = []
        if self._watch is not None:
            await self._watch.stop()
        if self._reconciler is not None:
            await self._acting.stop()
        if self._unsubscribe is not None:
            await self._unsubscribe()

    @property
    def _loop(self) -> Reconciler:
        if self._reconciler is None:
            raise InstanceError("The controller is still starting.")
        return self._reconciler

    def _poke(self, backends: Iterable[str] | None) -> None:
        self._loop.poke(backends)

    def _proxy_start(self, proxy: ProxyRecord) -> ProxyStart:
        reuse = self._http.location is Location.EVERY_WORKER
        shares = any(
            other.host == proxy.host and other.name in self._observed.proxies_ready
            for other in self._state.proxies.values()
            if other.name != proxy.name
        )
        return ProxyStart(
            options=self._http.model_copy(update={"port": proxy.port}),
            middlewares=self._start.middlewares,
            reuse_port=reuse,
            claims_port=not shares,
            public_host=proxy.host,
        )

    # Workers

    def _hear(self, message: Any) -> None:
        if message.get("kind") != WORKERS:
            return
        self._events += 1
        if message.get("is_adaptive"):
            self._observed.is_adaptive = True
        for worker in message["left"]:
            self._observed.workers.pop(worker, None)
            self._observed.lost_workers.add(worker)
        for fields in message["joined"]:
            info = WorkerInfo(**fields)
            self._observed.workers[info.address] = info
        for worker in message.get("retiring", ()):
            known = self._observed.workers.get(worker)
            if known is not None:
                self._observed.workers[worker] = replace(known, is_retiring=True, is_available=False)
        self._loop.poke()

    async def _refresh_workers(self) -> None:
        events = -1
        while events != self._events:
            # An event heard meanwhile may be newer than the answer, which would undo it.
            events = self._events
            infos = await self._cluster.workers()
        self._observed.workers = {info.address: info for info in infos}
        in_use = set(self._state.workers_in_use())
        self._observed.lost_workers |= in_use - set(self._observed.workers)

    async def _keep_refreshing(self) -> None:
        while True:
            await self._clock.sleep(REFRESH_S)
            known = self._observed.workers
            try:
                await self._refresh_workers()
            except (ServeError, OSError) as error:
                logger.warning("The list of workers could not be refreshed: %s", error)
            if self._observed.workers != known or self._observed.lost_workers:
                self._loop.poke()  # what no event told

    # Write, apply, notify

    async def _confirm_reign(self) -> None:
        """Return if this is the instance's newest controller; raise `StaleEpochError` if it was replaced."""
        self._cluster.forget_controller()
        newest = (await self._cluster.controller()).incarnation
        if newest != self._epoch:
            raise StaleEpochError(f"Controller epoch {self._epoch} was replaced by epoch {newest}.")

    def _apply(self, change: Change) -> None:
        self._state.apply(change)
        for key, record in change.items():
            if record is None and key.startswith("replica/"):
                self._observed.forget_replica(key.removeprefix("replica/"))
            elif isinstance(record, GoalRecord) and record.state is not GoalState.PENDING:
                self._loop.figures.goals[record.state] += 1
                self._observed.deadlines.pop(record.goal_id, None)
        self._notify(self._keys_touched(change))
        if any(key.startswith("backend/") for key in change):
            self._scaler.wake()
        if any(key.startswith("goal/") for key in change):
            ended, self._goal_ended = self._goal_ended, asyncio.Event()
            ended.set()

    def _keys_touched(self, change: Change) -> set[str]:
        keys: set[str] = set()
        for key in change:
            kind, _, name = key.partition("/")
            if kind == "endpoint":
                keys |= {key, "routes"}
            elif kind == "backend":
                keys.add(key)
            elif kind == "replica":
                keys.add(f"backend/{name.rpartition('#')[0]}")
        return keys

    def _all_keys(self) -> set[str]:
        state = self._state
        return {
            "routes",
            *(each.key for each in state.endpoints.values()),
            *(each.key for each in state.backends.values()),
        }

    def _notify(self, keys: Iterable[str]) -> SnapshotId:
        values: dict[str, Any] = {}
        for key in sorted(keys):
            kind, _, name = key.partition("/")
            if kind == "routes":
                values[key] = endpoint_state.published_routes(self._state)
            elif kind == "endpoint":
                values[key] = endpoint_state.published(self._state.endpoints.get(name))
            else:
                values[key] = backend_state.published(self._state, name)
        return self._news.notify(values)

    async def _barrier(self) -> list[int]:
        """Return the newest snapshot once every proxy that answers has applied it."""
        epoch, counter = self._news.snapshot_id
        # All that may listen, also those that this controller has not heard of yet.
        proxies = [
            proxy
            for proxy in self._state.proxies.values()
            if proxy.worker in self._observed.workers and proxy.worker not in self._observed.unresponsive
        ]
        waits = (self._wait_for_proxy(proxy, epoch, counter) for proxy in proxies)
        for proxy, outcome in zip(proxies, await asyncio.gather(*waits, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("Proxy %s did not confirm a change: %s", proxy.name, outcome)
        return [epoch, counter]

    async def _wait_for_proxy(self, proxy: ProxyRecord, epoch: int, counter: int) -> None:
        address = proxy.address(self._cluster.instance)
        call = self._cluster.call(
            address, "wait_for_snapshot", epoch=epoch, counter=counter, timeout_s=MAX_WAIT_S
        )
        # A process that is stopped does not even say that it did not hear in time.
        await self._clock.wait_for(call, MAX_WAIT_S)
