"""The actors of one worker: creates, finds, calls and stops them.

`daskserve.cluster.worker.host.Host` has one registry for its Dask worker, `daskserve.cluster.local` one for
each simulated worker. The registry sees its actors only as `HostedActor`, and depends on neither Dask nor the
local cluster.

Requests reach an actor through `ActorRegistry.dispatch`; see `daskserve.cluster.channel.channel`. The
registry itself has the name `HOST_ACTOR`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from daskserve.cluster.actors.recent_log import RecentLog, answer_of
from daskserve.cluster.actors.starting import started
from daskserve.cluster.channel.kept_results import KeptResults
from daskserve.cluster.protocols.base import (
    LAST_LINES,
    STOP_MARGIN_S,
    ActorSpec,
    HostedActor,
    ReportsHealth,
    ReportsLogs,
    ReportsMetrics,
    ReportsStart,
    TaskRequest,
    Verb,
    verb,
    verbs_of,
)
from daskserve.common.clock import Clock
from daskserve.common.types import (
    ActorKind,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    InstanceName,
    Load,
    Payload,
    Reachability,
    Receive,
    Send,
    WorkerAddress,
    described_actor,
)
from daskserve.context import current_instance
from daskserve.errors import ActorLostError, BadRequestError, UnavailableError
from daskserve.loops.tasks import TaskSet, is_cancelling
from daskserve.telemetry.collector import PROCESS
from daskserve.telemetry.logs.process import ProcessLogs, process_logs
from daskserve.telemetry.logs.ring import Query

logger = logging.getLogger("daskserve.host")

#: Share of the drain's time limit after which replicas stop, even if proxies still have requests in flight.
PROXY_SHARE = 0.5
#: The actor name that addresses a worker's registry itself.
HOST_ACTOR = "host"


def _nothing() -> None:
    pass


@contextmanager
def _acting_for(instance: InstanceName, logs: ProcessLogs) -> Iterator[None]:
    """Mark log records, including those of tasks that start within, with their instance and process."""
    of_instance, of_process = current_instance.set(instance), process_logs.set(logs)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that is garbage collected ends in another context
            current_instance.reset(of_instance)
            process_logs.reset(of_process)


@dataclass(slots=True, eq=False)
class Entry:
    """One actor."""

    spec: ActorSpec
    actor: HostedActor
    starting: asyncio.Task[Mapping[str, Any]]
    began_at: float
    was_ready: bool = False  # stays True once `is_ready` has been True
    stops_since: float | None = None
    # The actor, if it implements these protocols. Each check takes 10 µs, and workers are polled every
    # second.
    _with_health: ReportsHealth | None = field(init=False)
    _with_start: ReportsStart | None = field(init=False)
    _with_metrics: ReportsMetrics | None = field(init=False)

    def __post_init__(self) -> None:
        actor = self.actor
        self._with_health = actor if isinstance(actor, ReportsHealth) else None
        self._with_start = actor if isinstance(actor, ReportsStart) else None
        self._with_metrics = actor if isinstance(actor, ReportsMetrics) else None

    @property
    def is_ready(self) -> bool:
        if not self.was_ready:
            done = self.starting.done() and not self.starting.cancelled()
            self.was_ready = done and self.starting.exception() is None
        return self.was_ready

    def health(self) -> dict[str, Any]:
        """Return the actor's reported health; an actor without reports is healthy."""
        actor = self._with_health
        facts = actor.health() if actor is not None and self.is_ready else {}
        return {"is_healthy": True, "detail": "", **facts}

    def work(self, now: float) -> tuple[str, float] | None:
        """Return the current step of a starting or stopping actor, and how long it has lasted in seconds;
        None in other states."""
        if self.stops_since is not None:
            return "draining", now - self.stops_since
        if self.starting.done():
            return None
        actor = self._with_start
        what, since = ("starting", 0.0) if actor is None else actor.stage()
        return what, now - max(since, self.began_at)

    def metrics(self) -> dict[str, Any]:
        """Return the actor's metrics for autoscaling, if it has any."""
        actor = self._with_metrics
        return {"metrics": actor.metrics()} if actor is not None and self.is_ready else {}


class ActorRegistry:
    """Creates, finds, calls and stops the actors of one worker; see the module.

    Parameters
    ----------
    worker, pid : str, int
        The address of the worker, and the process id that its actors report.
    make : callable
        Creates an actor from its spec.
    surroundings : callable, optional
        Returns the context manager in which an actor is created and its start begins.
    on_change : callable, optional
        Called after an actor started or stopped.
    broken_routes : callable, optional
        Returns the workers that this process does not reach directly for an instance, each with its route.
    logs : ProcessLogs, optional
        The logs of this process.
    recent_log : RecentLog, optional
        The last log lines of the actors, for the status of failed ones.
    parts
        Other objects with verbs of the process.

    Attributes
    ----------
    entries : dict
        The actors by name, ready or not.
    kept : KeptResults
        The large answers of the actors that stay here for other processes.
    """

    def __init__(
        self,
        worker: WorkerAddress,
        pid: int,
        clock: Clock,
        make: Callable[[ActorSpec], HostedActor],
        *,
        surroundings: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_change: Callable[[], None] = _nothing,
        broken_routes: Callable[[InstanceName], Mapping[WorkerAddress, Reachability]] = lambda _: {},
        recent_log: RecentLog | None = None,
        logs: ProcessLogs | None = None,
        parts: Sequence[object] = (),
    ) -> None:
        self.worker = worker
        self.entries: dict[str, Entry] = {}
        self.kept = KeptResults(worker)
        self._pid = pid
        self._clock = clock
        self._make = make
        self._surroundings = surroundings
        self._on_change = on_change
        self._broken_routes = broken_routes
        self._recent_log = recent_log
        self._is_ending = False
        self._stopping = TaskSet(logger)
        self._logs = logs or ProcessLogs()
        self._verbs = verbs_of(self, _LogVerbs(self, self._logs), *parts)

    def __repr__(self) -> str:
        return f"<ActorRegistry of {self.worker} actors={len(self.entries)}>"

    def dispatch(self, name: str, incarnation: int, envelope: Envelope) -> ActorRequest:
        """Handle a request: a control call, or a request to the registry or an actor."""
        if envelope.kind is EnvelopeKind.CONTROL:
            return TaskRequest(partial(self._control, name, incarnation, envelope))
        return self.handler_of(name, incarnation)(envelope)

    def handler_of(self, name: str, incarnation: int) -> Callable[[Envelope], ActorRequest]:
        """Return the ``handle`` of an actor; raises the errors of `ready_actor`."""
        entry = self.entries.get(name)
        if entry is None or not entry.was_ready or entry.spec.incarnation != incarnation:
            return self.ready_actor(name, incarnation).handle
        return entry.actor.handle

    async def _control(
        self, name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        value = await self.call(name, incarnation, envelope.head["verb"], envelope.head["message"])
        key = "payload" if isinstance(value, Payload) else "value"
        await send({"type": "control.result", key: value})
        return Load()

    @verb
    async def create(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Create an actor, wait until it is ready and return its facts; see `Cluster.create`."""
        if self._is_ending:
            # Without a scheduler, a controller is not notified that the worker is ending, and would start new
            # actors here.
            raise UnavailableError(f"Worker {self.worker} is shutting down and starts no more actors.")
        wanted = ActorSpec(**{**spec, "kind": ActorKind(spec["kind"])})
        entry = self.entries.get(wanted.name)
        while entry is not None and entry.spec.incarnation < wanted.incarnation:
            await self._remove(entry, grace_s=0)
            entry = self.entries.get(wanted.name)  # another caller may have created one
        if entry is None:
            entry = self._enter(wanted)
        elif entry.spec.incarnation > wanted.incarnation:
            raise ActorLostError(
                f"{described_actor(wanted.name)} is at incarnation {entry.spec.incarnation}; "
                f"{wanted.incarnation} is older."
            )
        try:
            limit_s = wanted.start_timeout_s
            return dict(await started(entry.starting, wanted.name, limit_s, self._clock, entry.work))
        except asyncio.CancelledError:
            if entry.starting.cancelled() and not is_cancelling():
                raise ActorLostError(
                    f"{described_actor(wanted.name)} was stopped while it started."
                ) from None
            raise
        except Exception as error:
            if lines := self._last_lines(wanted.name):
                # An error of a child process already has the child's lines.
                error.__dict__.setdefault(LAST_LINES, lines)
            await self._remove(entry, grace_s=0)
            raise

    def _last_lines(self, name: str) -> tuple[str, ...]:
        return () if self._recent_log is None else self._recent_log.of(name)

    def _health_of(self, entry: Entry) -> dict[str, Any]:
        facts = entry.health()
        if not facts["is_healthy"] and LAST_LINES not in facts:
            facts[LAST_LINES] = self._last_lines(entry.spec.name)
        return facts

    def _enter(self, spec: ActorSpec) -> Entry:
        with self._surroundings(), _acting_for(spec.instance, self._logs):
            actor = self._make(spec)
            starting = asyncio.create_task(self._start(actor), name=f"daskserve-start-{spec.name}")
        entry = Entry(spec, actor, starting, self._clock.now())
        self.entries[spec.name] = entry
        PROCESS.add(actor)
        return entry

    async def _start(self, actor: HostedActor) -> Mapping[str, Any]:
        try:
            return {**await actor.start(), "pid": self._pid}
        finally:
            self._on_change()

    @verb
    async def destroy(self, name: str, incarnation: int, grace_s: float) -> None:
        """Stop and remove an actor; do nothing if it does not exist, or if a newer one has its name."""
        entry = self.entries.get(name)
        if entry is not None and entry.spec.incarnation <= incarnation:
            await self._remove(entry, grace_s)

    async def _remove(self, entry: Entry, grace_s: float) -> None:
        # Shielded: the caller, such as a killed controller, may be cancelled, but the stop must complete.
        await asyncio.shield(self._stopping.spawn(self._stop(entry, grace_s), f"stop-{entry.spec.name}"))

    async def _stop(self, entry: Entry, grace_s: float) -> None:
        with _acting_for(entry.spec.instance, self._logs):
            if entry.stops_since is None:
                entry.stops_since = self._clock.now()
            if not entry.starting.done():
                entry.starting.cancel()
            try:
                await self._clock.wait_for(entry.actor.stop(grace_s), grace_s + STOP_MARGIN_S)
            finally:
                if self.entries.get(entry.spec.name) is entry:
                    del self.entries[entry.spec.name]
                    if self._recent_log is not None:
                        self._recent_log.forget(entry.spec.name)
                PROCESS.remove(entry.actor)
                self._on_change()

    @verb
    async def actors(self, instance: InstanceName, metrics_of: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return an instance's actors; see `Cluster.inspect`."""
        named = set(metrics_of)
        routes = {worker: route.value for worker, route in self._broken_routes(instance).items()}
        broken = {"broken_routes": routes} if routes else {}
        now = self._clock.now()
        return [
            {
                "name": entry.spec.name,
                "kind": entry.spec.kind.value,
                "incarnation": entry.spec.incarnation,
                "is_ready": entry.is_ready,
                **self._health_of(entry),
                **({} if (work := entry.work(now)) is None else {"busy": work}),
                **(entry.metrics() if entry.spec.name in named else {}),
                **broken,
                **({} if (file := self._logs.file_of(entry.spec.name)) is None else {"log_file": file}),
                "worker": self.worker,
                "pid": self._pid,
            }
            for entry in self.entries.values()
            if entry.spec.instance == instance
        ]

    @verb
    async def kept_result(self, token: str) -> Payload:
        """Return an answer that is kept here; raise `UnavailableError` if its caller has dropped it."""
        return self.kept.find(token)

    def controllers(self) -> list[Entry]:
        """Return the controllers that are ready."""
        return [
            entry
            for entry in self.entries.values()
            if entry.spec.kind is ActorKind.CONTROLLER and entry.is_ready
        ]

    def newest_epoch(self, instance: InstanceName) -> int:
        """Return the newest epoch among the actors of an instance; 0 if it has none here."""
        return max(
            (each.spec.epoch for each in self.entries.values() if each.spec.instance == instance), default=0
        )

    async def end_controllers(self) -> None:
        """Stop all controllers; the actors that they started keep running."""
        await asyncio.gather(*map(self._end, self.controllers()))

    async def drain(self, grace_s: float, instance: InstanceName | None = None) -> None:
        """Stop all actors, or those of one instance, once their requests have completed or timed out.

        Without an instance name, the worker is about to end, so it starts no more actors.

        The controller stops first, so that it does not replace the others. Proxies stop before the replicas
        that answer their requests. After half of the time, replicas stop accepting requests even if proxies
        still have some.
        """
        self._is_ending |= instance is None
        ends_at = self._clock.now() + grace_s
        mine = [entry for entry in self.entries.values() if instance in (None, entry.spec.instance)]

        def end(kind: ActorKind) -> list[asyncio.Task[None]]:
            left_s = max(0.0, ends_at - self._clock.now())
            ending = [each for each in mine if each.spec.kind is kind]
            return [asyncio.create_task(self._end(each, left_s)) for each in ending]

        await asyncio.gather(*end(ActorKind.CONTROLLER), *end(ActorKind.BUILDER))
        proxies = end(ActorKind.PROXY)
        if proxies:
            await asyncio.wait(proxies, timeout=grace_s * PROXY_SHARE)
        await asyncio.gather(*proxies, *end(ActorKind.REPLICA))

    async def _end(self, entry: Entry, grace_s: float = 0) -> None:
        try:
            await self._remove(entry, grace_s)
        except Exception:
            # An actor that fails to stop must not prevent the others from stopping.
            logger.exception("Actor %s failed to stop", entry.spec.name)

    async def call(self, name: str, incarnation: int, verb: str, message: Mapping[str, Any]) -> Any:
        """Call a verb of an actor, or of the registry itself; see `Cluster.call`."""
        verbs = self._verbs if name == HOST_ACTOR else self._verbs_now(name, incarnation, verb)
        if verb not in verbs:
            raise BadRequestError(f"{name} has no verb {verb!r}; known: {', '.join(sorted(verbs))}")
        entry = self.entries.get(name)
        with _acting_for("" if entry is None else entry.spec.instance, self._logs):
            return await verbs[verb](**message)

    def _verbs_now(self, name: str, incarnation: int, verb: str) -> Mapping[str, Verb]:
        """Return the verbs of an actor; raise like `ready_actor`, unless the verb may be called early."""
        entry = self.entries.get(name)
        is_here = entry is not None and entry.spec.incarnation == incarnation
        if entry is not None and is_here and getattr(entry.actor.verbs.get(verb), "is_early", False):
            return entry.actor.verbs
        return self.ready_actor(name, incarnation).verbs

    def ready_actor(self, name: str, incarnation: int) -> HostedActor:
        """Return an actor.

        Raises
        ------
        ActorLostError, UnavailableError
            The actor is not here, or is still starting.
        """
        entry = self.entries.get(name)
        if entry is None or entry.spec.incarnation != incarnation:
            raise ActorLostError(f"{described_actor(name)} is not on {self.worker}.", begun=False)
        if not entry.is_ready:
            raise UnavailableError(f"{described_actor(name)} is still starting.")
        return entry.actor


class _LogVerbs:
    """The verb for the logs of a process."""

    def __init__(self, registry: ActorRegistry, logs: ProcessLogs) -> None:
        self._registry = registry
        self._logs = logs

    @verb
    async def logs(self, query: Mapping[str, Any], after: Mapping[str, int] | None) -> dict[str, Any]:
        """Return the last log records of this process and of the child processes of its replicas."""
        wanted = Query(**query)
        actors = [each.actor for each in self._registry.entries.values()]
        replicas = [each for each in actors if isinstance(each, ReportsLogs)]
        running = [found for each in replicas if (found := each.log_file()) is not None]
        files = [
            # A child process that ends closes its file, so the read uses a copy of the descriptor.
            each._replace(descriptor=os.dup(each.descriptor))
            for each in (*self._logs.ended, *running)
            if wanted.instance in (None, each.instance)
        ]

        def read() -> dict[str, Any]:
            try:
                return answer_of(self._registry.worker, self._logs, files, wanted, after)
            finally:
                for each in files:
                    os.close(each.descriptor)

        # Shielded: if the thread were cancelled before it starts, the files would stay open.
        return await asyncio.shield(asyncio.to_thread(read))
