"""The core of a controller: its lifecycle, its view of the workers, and the path of every change."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from daskserve.cluster.long_poll import WORKERS, LongPollHost
from daskserve.cluster.protocols.base import ActorContext, Cluster
from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.common.clock import Clock
from daskserve.common.types import (
    SILENT_WORKERS,
    STORE_TAKEN,
    TRACING,
    UNREADY,
    Location,
    SnapshotId,
    WorkerInfo,
    short_tag,
)
from daskserve.control.action_executor import ActionExecutor
from daskserve.control.backend.deaths import remembered
from daskserve.control.backend.model_reconciler import ModelReconciler
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions import goals, target_capacity
from daskserve.control.decisions.history.recorder import HistoryRecorder
from daskserve.control.declared.building import Building
from daskserve.control.observed.observed import Observed
from daskserve.control.observed.watch import WorkerWatch
from daskserve.control.proxies.step import ProxyRules, is_ready
from daskserve.control.proxies.store_trial import StoreTrial
from daskserve.control.proxies.take_over import ListenRules
from daskserve.control.reconcile import Reconciler
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import BackendRecord, Change, GoalRecord, GoalState, Record
from daskserve.control.records.state import State
from daskserve.control.records.storing import checkpoint
from daskserve.control.records.storing.writer import Writer
from daskserve.control.scaling.rollout_queries import RolloutQueries
from daskserve.control.scaling.scaler import Scaler
from daskserve.control.views.published import published_backend, published_system
from daskserve.control.views.readiness import unready
from daskserve.errors import InstanceError, ServeError, StaleEpochError
from daskserve.loops.tasks import TaskSet
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ControllerStart, ProxyStart
from daskserve.payload.importing import call_imported
from daskserve.telemetry.live import LIVE_METRICS
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import LOGGING, Tags
from daskserve.telemetry.table import MetricSample

logger = logging.getLogger("daskserve.controller")

#: Time within which a proxy must confirm a change, and the longest wait of a verb.
MAX_WAIT_S = 30.0
#: Interval at which the full list of workers is fetched, in case an event was lost.
REFRESH_S = 30.0
#: For a kind of record, the published key that changes together with the record's own key.
_TOUCHED: Mapping[str, str] = {"endpoint": "routes", "app": "routes", "proxy": "system", "capacity": LOGGING}


class ControllerCore:
    """The core of the controller of one instance. ``context.spec.incarnation`` is its epoch."""

    def __init__(self, context: ActorContext) -> None:
        self.cluster: Cluster = context.cluster
        self.clock: Clock = context.clock
        self.rng: random.Random = context.rng
        self.epoch = context.spec.incarnation
        self.worker = context.worker
        self.start_message = ControllerStart.decode(context.spec.payload)
        self.http = HTTPOptions(**vars(self.start_message.http))
        self.long_poll = LongPollHost(self.epoch, self.cluster.publish, self.clock)
        self.state = State()
        self.observed = Observed(system_workers=tuple(self.http.system_workers))
        self.goal_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._reconciler: Reconciler | None = None
        #: Functions that `stop` calls, the last one first.
        self.undoing: list[Callable[[], Awaitable[object]]] = []
        if context.logs is not None:
            follow_logging(self, context, context.logs)

    async def start(self) -> dict[str, Any]:
        """Load the state from the store and start the reconcile loop."""
        callback = self.start_message.callback
        if callback is not None:
            await asyncio.to_thread(call_imported, callback, "daskserve.controller.callback")
        records = await self.cluster.store.load()
        self.state, self.corrupt = checkpoint.restore(records)
        self.observed.inherited = goals.pending(self.state)
        self.observed.notes = {tag: remembered(each) for tag, each in self.state.events.deaths.items()}
        reconciler = self._reconciler = self._make_parts()
        self.building = Building(
            self.cluster,
            self.clock,
            self.rng,
            self.state,
            self.observed,
            self.writer,
            epoch=self.epoch,
            next_worker=reconciler.next_worker,
            enqueue=reconciler.enqueue,
        )
        self.undoing.append(self.building.stop)
        self.scaler = Scaler(self.state, self.observed, self.clock, reconciler.enqueue, self.cluster.tasks)
        self.undoing.append(await self.cluster.subscribe(self._on_message))
        await self._refresh_workers()
        self.observed.unready = unready(self.state, frozenset(), self.state.backends.keys())
        self._notify(self._all_keys())
        watch = WorkerWatch(
            self.cluster,
            self.clock,
            self.state,
            self.observed,
            enqueue=reconciler.enqueue,
            announce=self._announce_levels,
            confirm_reign=self.confirm_reign,
            epoch=self.epoch,
        )
        models = ModelReconciler(self.cluster, self.clock, self.state, self.observed, self.writer)
        queries = RolloutQueries(self.state, self.observed, self.clock)
        self.undoing += [watch.stop, models.stop]
        watching = self.spawn(watch.run(), "watch-workers")
        reconciling = self.spawn(reconciler.run(), "reconcile")
        # The loop ends if a newer controller has taken over, and then this one must also stop acting.
        reconciling.add_done_callback(lambda _: watching.cancel())
        self.spawn(self._keep_refreshing(), "refresh")
        self.spawn(self.scaler.run(), "scale")
        self.spawn(queries.run(), "rollout-queries")
        self.spawn(self.building.run(), "build")
        self.spawn(models.run(), "models")
        noting = TaskSet(logger)
        noting.spawn(self._note_start(), "note-start")
        self.undoing.append(partial(noting.close, timeout_s=2))
        self.trial.begin()
        reconciler.metrics.started_at = self.clock.wall()
        return {"epoch": self.epoch}

    async def _note_start(self) -> None:
        try:
            async with self.writer:
                await self.writer.note(self.history.of_start(self.worker))
        except (ServeError, OSError) as error:
            logger.warning("The start of the controller could not be added to the events: %s", error)

    def _make_parts(self) -> Reconciler:
        """Create the writer, the loop and its parts for the loaded state; return the loop."""
        self.history = HistoryRecorder(self.state, self.clock, self.epoch, self.start_message.history_bytes)
        self.writer = Writer(self.cluster.store, self.epoch, self.state, self._apply, self.history.accompany)
        self.trial = StoreTrial(
            self.cluster.store,
            self.epoch,
            self.state,
            self.observed,
            self.clock,
            lock=self.writer,
            adopt=self._adopt,
            has_proxies=self.http.has_proxies and not self.start_message.opens_with_route,
        )
        executor = ActionExecutor(
            self.cluster,
            self.clock,
            self.state,
            self.observed,
            commit=self.writer.note,
            lock=self.writer,
            proxy_start=self._proxy_start,
            enqueue=lambda backends: self.loop.enqueue(backends),
            announce=lambda tags: self._notify(f"backend/{tag}" for tag in tags),
            debug=self.http.debug,
            logging_config=lambda: target_capacity.logging_of(self.state, self.start_message),
            tracing=self.start_message.tracing,
        )
        self.undoing += [executor.stop, self.trial.stop]
        return Reconciler(
            self.state,
            self.observed,
            executor,
            self.clock,
            self.rng,
            commit=self.writer.note,
            lock=self.writer,
            worker=self.worker,
            rules=ProxyRules.of(self.http, avoid=self.worker, start_id=self.start_message.start_id),
            listen_rules=ListenRules(self.http.take_over, self.start_message.opens_with_route),
            epoch=self.epoch,
        )

    def samples(self) -> list[MetricSample]:
        """Return the metric samples; see `daskserve.telemetry.table.Source`."""
        if self._reconciler is None:
            return []
        metrics = self._reconciler.metrics
        counts = metrics.counts(self.cluster.instance)
        # A controller that has ended or was replaced has outdated values.
        if not self._tasks or any(task.done() for task in self._tasks):
            return counts
        me = (self.cluster.instance,)
        counts.append(("store_owned", me, int(self.cluster.store.ownership.is_ours)))
        counts.append(("long_poll_waiting_calls", me, self.long_poll.waiting))
        return counts + metrics.states(self.cluster.instance, self.epoch, self.state, self.observed)

    async def stop(self, grace_s: float) -> None:
        """Stop the loop. The actors keep running; their Hosts stop them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        self._tasks = []
        while self.undoing:
            await self.undoing.pop()()

    @property
    def loop(self) -> Reconciler:
        if self._reconciler is None:
            raise InstanceError("The controller is still starting.")
        return self._reconciler

    @property
    def process(self) -> dict[str, Any]:
        """The worker and the process of this controller."""
        return {"worker": self.worker, "pid": os.getpid()}

    def problems(self) -> dict[str, str]:
        """Return the problems of the store and its records, by store and key."""
        return {**self.cluster.store.problems(), **{key: str(each) for key, each in self.corrupt.items()}}

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until the controller stops."""
        task = asyncio.create_task(coroutine, name=f"daskserve-{name}")
        task.add_done_callback(_log_failure)
        self._tasks.append(task)
        return task

    def resume(self) -> None:
        """Run the loop again if it ended because another cluster had taken over."""
        if any(task.done() and task.get_name() == "daskserve-reconcile" for task in self._tasks):
            self.spawn(self.loop.run(), "reconcile")

    def _proxy_start(self, proxy: ProxyRecord) -> ProxyStart:
        others = [each for each in self.state.proxies.values() if each.tag != proxy.tag]
        here = [each for each in others if each.host == proxy.host]
        ports = [each.port for each in here if each.is_leaving or is_ready(self.observed, each)]
        port = max(ports, default=0) if proxy.may_move else 0
        return ProxyStart(
            options=self.http.model_copy(update={"port": port or proxy.port}),
            middlewares=self.start_message.middlewares,
            # Set wherever possible, so that during an upgrade the new instance can listen on the same port.
            reuse_port=self.http.location is Location.EVERY_WORKER or hasattr(socket, "SO_REUSEPORT"),
            claims_port=not (self.http.take_over or ports),
            may_move=proxy.may_move and not ports,
            public_host=proxy.host,
            logging=target_capacity.logging_of(self.state, self.start_message),
            tracing=self.start_message.tracing,
        )

    # Workers

    def _on_message(self, message: Any) -> None:
        if message.get("kind") != WORKERS:
            return
        self.observed.worker_events += 1
        if "taken" in message:
            return self.loop.enqueue(self.observed.note_taken(message["taken"]))
        if message.get("is_adaptive"):
            self.observed.is_adaptive = True
        for worker in message["left"]:
            self.observed.workers.pop(worker, None)
            self.observed.lost_workers.add(worker)
        for fields in message["joined"]:
            info = self.observed.marked(WorkerInfo(**fields))
            self.observed.workers[info.address] = info
        for worker in message.get("retiring", ()):
            self.observed.change_worker(worker, is_retiring=True, is_available=False)
        self._note_system_workers()
        self.loop.enqueue()

    def _note_system_workers(self) -> None:
        """Log when the first of the ``system_workers`` joins the cluster, or the last one leaves."""
        names, had_any = ", ".join(self.observed.system_workers), self.observed.had_system_workers
        self.observed.had_system_workers = self.observed.has_system_workers()
        if self.observed.had_system_workers is had_any:
            return
        if self.observed.had_system_workers:
            logger.info("A system worker (%s) is in the cluster", names)
        else:
            logger.warning(
                "None of the system_workers (%s) is in the cluster; until one joins, the controller and the "
                "proxies run on the workers of replicas",
                names,
            )

    async def _refresh_workers(self) -> None:
        events = -1
        while events != self.observed.worker_events:
            # The answer must not undo an event that arrived during the call, because the event may be newer.
            events = self.observed.worker_events
            infos = await self.cluster.workers()
        self.observed.workers = {info.address: self.observed.marked(info) for info in infos}
        self.observed.lost_workers |= self.state.workers_in_use() - self.observed.workers.keys()
        self._note_system_workers()

    async def _keep_refreshing(self) -> None:
        while True:
            await self.clock.sleep(REFRESH_S)
            known = self.observed.workers
            try:
                await self._refresh_workers()
            except Exception as error:  # for any error, the next refresh may succeed
                logger.warning("The list of workers could not be refreshed: %r", error)
            if self.observed.workers != known or self.observed.lost_workers:
                self.loop.enqueue()  # changes without an event

    # Write, apply, notify

    async def confirm_reign(self) -> None:
        """Check that this is the instance's newest controller; raise `StaleEpochError` if it was replaced."""
        self.cluster.forget_controller()
        newest = (await self.cluster.controller()).incarnation
        if newest != self.epoch:
            raise StaleEpochError(f"Controller epoch {self.epoch} was replaced by epoch {newest}.")

    def learn_of_store(self, condition: Mapping[str, Any]) -> None:
        """Record the store's condition, which the scheduler reports at intervals."""
        self.cluster.store.learn(condition)
        self._notify({STORE_TAKEN})

    async def _adopt(self, changed: Mapping[str, bytes | None]) -> None:
        """Apply the changes that the previous owner has written to the store during the trial."""
        change, corrupt = checkpoint.read({key: each for key, each in changed.items() if each is not None})
        for key, error in corrupt.items():
            logger.error("Stored record %s is skipped: %s", key, error)
        self.corrupt |= corrupt
        known = self.state.records()
        change.update({key: None for key, each in changed.items() if each is None and key in known})
        self._apply(change)
        self.observed.inherited |= goals.pending(self.state)
        backends = self.state.backends
        left: Change = {
            each.key: None for each in self.state.replicas.values() if each.backend not in backends
        }
        await self.writer.note(left)  # their actors are stopped, like all actors without a record
        self.loop.enqueue()

    def _apply(self, change: Change) -> None:
        self.state.apply(change)
        forget = {
            "replica": self.observed.forget_replica,
            "proxy": self.observed.forget_proxy,
            "backend": self.observed.forget_backend,
        }
        kinds = set()
        for key, record in change.items():
            kind, _, name = key.partition("/")
            kinds.add(kind)
            self.corrupt.pop(key, None)
            if record is None and kind in forget:
                forget[kind](name)
            elif isinstance(record, BackendRecord) and record.canary is None:
                self.observed.forget_rollout(record.tag)
            elif isinstance(record, GoalRecord) and record.state is not GoalState.PENDING:
                self.loop.metrics.goals[record.state] += 1
                self.observed.deadlines.pop(record.goal_id, None)
        keys = _keys_touched(change)
        tags = {key.removeprefix("backend/") for key in keys}  # other keys match no tag
        self.observed.unready = unready(self.state, self.observed.unready, tags)
        self._notify(keys | {UNREADY})
        if "backend" in kinds:
            self.scaler.wake()
        if "event" in kinds:
            self.history.note_added()
        if not kinds.isdisjoint(("config", "goal")):
            self.building.wake()
        if "config" in kinds or any(_may_end_waiting(record) for record in change.values()):
            ended, self.goal_ended = self.goal_ended, asyncio.Event()
            ended.set()

    def _all_keys(self) -> set[str]:
        state = self.state
        return {
            "routes",
            "system",
            UNREADY,
            STORE_TAKEN,
            TRACING,
            LOGGING,
            *(each.key for each in state.endpoints.values()),
            *(each.key for each in state.backends.values()),
        }

    def _notify(self, keys: Iterable[str]) -> SnapshotId:
        values: dict[str, Any] = {}
        for key in sorted(keys):
            kind, _, name = key.partition("/")
            if kind == "routes":
                values[key] = endpoint_state.published_routes(self.state)
            elif kind == UNREADY:
                values[key] = sorted(map(short_tag, self.observed.unready))
            elif kind == STORE_TAKEN:
                values[key] = self.cluster.store.ownership is StoreOwnership.TAKEN or None
            elif kind == LOGGING:
                values[key] = {"config": target_capacity.logging_of(self.state, self.start_message)}
            elif kind == TRACING:
                config = self.start_message.tracing
                values[key] = config["sampling_ratio"] if config.get("enabled") else None
            elif kind == "system":
                values[key] = published_system(self.state, self.worker)
            elif kind == "endpoint":
                values[key] = endpoint_state.published(self.state.endpoints.get(name))
            else:
                values[key] = published_backend(self.state, name, self.observed.notes_of(name).unloadable)
        return self.long_poll.notify({**values, **self.observed.take_reports()})

    def _announce_levels(self) -> None:
        self.long_poll.notify(
            {
                SILENT_WORKERS: sorted(self.observed.unresponsive) or None,
                LIVE_METRICS: self.observed.live.is_watched(self.clock.now()) or None,
                **self.observed.take_reports(),
            }
        )

    async def barrier(self) -> list[int]:
        """Return the newest snapshot once every proxy that answers has applied it."""
        epoch, counter = self.long_poll.snapshot_id
        # All proxies that may listen, including proxies that this controller has not observed yet.
        proxies = [
            proxy
            for proxy in self.state.proxies.values()
            if proxy.worker in self.observed.workers
            and proxy.worker not in self.observed.unresponsive
            and proxy.tag not in self.observed.proxies_gone
        ]
        waits = (self._wait_for_proxy(proxy, epoch, counter) for proxy in proxies)
        for proxy, outcome in zip(proxies, await asyncio.gather(*waits, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("Proxy %s did not confirm a change: %s", proxy.name, outcome)
        return [epoch, counter]

    async def _wait_for_proxy(self, proxy: ProxyRecord, epoch: int, counter: int) -> None:
        address = proxy.address(self.cluster.instance)
        call = self.cluster.call(
            address, "wait_for_snapshot", epoch=epoch, counter=counter, timeout_s=MAX_WAIT_S
        )
        # A suspended process cannot report its own timeout.
        await self.clock.wait_for(call, MAX_WAIT_S)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("The task %s of the controller failed", task.get_name(), exc_info=task.exception())


def _keys_touched(change: Change) -> set[str]:
    """Return the published keys whose values a change may change."""
    keys: set[str] = set()
    for key in change:
        kind, _, name = key.partition("/")
        if kind in ("backend", "endpoint"):
            keys.add(key)
        elif kind == "replica":
            keys.add(f"backend/{name.rpartition('#')[0]}")
        if kind in _TOUCHED:
            keys.add(_TOUCHED[kind])
    return keys


def _may_end_waiting(record: Record | None) -> bool:
    """Return whether a change of a record may end the wait of callers that wait for a goal."""
    return isinstance(record, GoalRecord) or (isinstance(record, BackendRecord) and record.canary is not None)


def follow_logging(core: ControllerCore, context: ActorContext, logs: ProcessLogs) -> None:
    """Apply the instance's logging options to the controller, until it stops."""
    spec = context.spec
    configure = partial(logs.configure, spec.name, Tags(component="controller", instance=spec.instance))
    configure(core.start_message.logging)

    def learn(found: Any) -> None:
        if found is not None:
            configure(found["config"])

    stop = context.cluster.listener.watch(LOGGING, learn)

    async def end() -> None:
        stop()
        logs.forget(spec.name)

    core.undoing.append(end)
