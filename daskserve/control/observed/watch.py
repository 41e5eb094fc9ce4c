"""Watches the workers. A stopped process, unlike a dead one, does not close its connections.

Once a second, the controller queries every worker in use for the instance's actors and their health. Each
answer is complete, so it also reveals changes without an event: an actor that vanished, or one without a
record. After three consecutive missed answers, a worker is unresponsive: its replicas are replaced at once,
and routers give up their requests to it. A worker with a proxy is restarted, to free the port.

After a missed answer, the next query goes through the scheduler, because perhaps only the network between the
worker and the controller is broken. The query after that is direct again, because the scheduler may be
unavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import ANSWER_S, EPOCH_BITS, LAST_LINES, Cluster
from daskserve.common.clock import Clock
from daskserve.common.types import (
    ActorAddress,
    ActorKind,
    ReplicaState,
    WorkerAddress,
    as_rank_info,
    short_tag,
)
from daskserve.control.observed.observed import Activity, Observed
from daskserve.control.records.model_decisions import rollouts_of
from daskserve.control.records.records import ReplicaRecord
from daskserve.control.records.state import State
from daskserve.errors import ActorLostError, ServeError, StaleEpochError, UnavailableError
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.controller")

PERIOD_S = 1.0
#: Interval of the queries of a worker whose replicas load multiplexed models, in seconds.
FOLLOW_S = 0.08
#: Maximum number of these queries of one worker in a row.
FOLLOWED = 50
#: Maximum rate of these queries for all workers together, per second.
MAX_FOLLOW_RATE = 100.0
MISSES = 3
#: Pause before the next attempt to restart a worker.
RESTART_RETRY_S = 2.0
#: Interval at which workers without known actors are checked for leftover actors.
SWEEP_S = 30.0


class WorkerWatch:
    """Updates `Observed`, and stops older controllers and actors without a record."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        state: State,
        observed: Observed,
        *,
        enqueue: Callable[[Iterable[str] | None], None],
        announce: Callable[[], None],
        confirm_reign: Callable[[], Awaitable[None]],
        epoch: int,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._state = state
        self._observed = observed
        self._enqueue = enqueue
        #: Publishes unresponsive workers, reports of replicas, and whether a client reads live metrics.
        self._announce = announce
        #: Raises an error if a newer controller has taken over.
        self._confirm_reign = confirm_reign
        self._epoch = epoch
        # A replaced controller must not treat its successor's actors as orphans.
        self._newest_incarnation = (epoch + 1) << EPOCH_BITS
        self._misses: dict[WorkerAddress, int] = {}
        self._asking: set[WorkerAddress] = set()
        #: The workers that are queried every ``FOLLOW_S`` seconds.
        self._followed: set[WorkerAddress] = set()
        self._tasks = TaskSet(logger)
        observed.multiplexed.on_loading = self.follow

    async def run(self) -> None:
        """Watch until cancelled."""
        swept_at = self._clock.now()
        while True:
            began = self._clock.now()
            workers = self._state.workers_in_use() | self._observed.unresponsive
            if began - swept_at >= SWEEP_S:
                swept_at = began
                workers |= set(self._observed.workers)
            for worker in sorted(workers & self._observed.workers.keys()):
                self._tasks.spawn(self._check(worker), "watch")
            self._forget_workers()
            if self._observed.live.end(began):
                self._announce()
            await self._clock.sleep(max(0.0, began + PERIOD_S - self._clock.now()))

    def follow(self, tags: Iterable[str]) -> None:
        """Query the workers of replicas at once, and often while the replicas load multiplexed models."""
        replicas = [each for tag in tags if (each := self._state.replicas.get(tag)) is not None]
        for worker in {each.worker for each in replicas if each.worker} - self._followed:
            self._followed.add(worker)
            self._tasks.spawn(self._follow(worker), "watch")

    async def _follow(self, worker: WorkerAddress) -> None:
        try:
            for count in range(FOLLOWED):
                await self._check(worker)
                tags = [each.tag for each in self._state.replicas_on(worker)]
                if count > 1 and not any(map(self._observed.multiplexed.is_loading, tags)):
                    return
                # All followed workers share ``MAX_FOLLOW_RATE``.
                await self._clock.sleep(max(FOLLOW_S, len(self._followed) / MAX_FOLLOW_RATE))
        finally:
            self._followed.discard(worker)

    async def stop(self) -> None:
        """Cancel the queries in progress."""
        await self._tasks.close(timeout_s=2)

    async def _check(self, worker: WorkerAddress) -> None:
        if worker in self._asking:
            return
        self._asking.add(worker)
        # The answer may lack an actor that started after the query.
        expected = [each for each in self._state.replicas_on(worker) if each.state is ReplicaState.RUNNING]
        scaled, instance = self._state.autoscaled, self._cluster.instance
        is_watched = self._observed.live.is_watched(self._clock.now())
        names = [
            each.address(instance).name
            for each in self._state.replicas_on(worker)
            if is_watched or each.backend in scaled
        ]
        if is_watched:
            names += [each.address(instance).name for each in self._state.proxies.on(worker)]
        by_scheduler = self._misses.get(worker, 0) % 2 == 1
        asking = self._cluster.inspect(worker, metrics_of=names, by_scheduler=by_scheduler)
        try:
            actors = await self._clock.wait_for(asking, ANSWER_S)
        except (ServeError, OSError, TimeoutError) as error:
            self._missed(worker, error)
        else:
            self._answered(worker, actors, expected)
        finally:
            self._asking.discard(worker)

    def _missed(self, worker: WorkerAddress, error: BaseException) -> None:
        misses = self._misses[worker] = self._misses.get(worker, 0) + 1
        info = self._observed.workers.get(worker)
        if info is None or worker in self._observed.unresponsive:
            return
        # The supervisor has already replaced a controller on this worker, so one missed answer is enough.
        if misses < (1 if info.is_suspect else MISSES):
            return
        logger.warning("Worker %s does not answer (%r); its replicas are replaced", worker, error)
        self._observed.unresponsive.add(worker)
        self._announce()
        if self._state.proxies.on(worker):
            self._tasks.spawn(self._restart(worker), "watch")
        self._enqueue(None)

    async def _restart(self, worker: WorkerAddress) -> None:
        while worker in self._observed.unresponsive:
            try:
                await self._cluster.restart_worker(self._epoch, worker)
                return
            except (ServeError, OSError) as error:
                logger.warning("Worker %s holds a proxy and could not be restarted: %s", worker, error)
                if not isinstance(error, OSError | UnavailableError) or isinstance(error, StaleEpochError):
                    return
            await self._clock.sleep(RESTART_RETRY_S)

    def _answered(
        self, worker: WorkerAddress, actors: Sequence[Mapping[str, Any]], expected: Sequence[ReplicaRecord]
    ) -> None:
        self._misses.pop(worker, None)
        if worker in self._observed.unresponsive:
            logger.info("Worker %s answers again", worker)
            self._observed.unresponsive.discard(worker)
            self._announce()
            self._enqueue(None)
        broken = next((each["broken_routes"] for each in actors if "broken_routes" in each), None)
        if broken is None:
            self._observed.broken_routes.pop(worker, None)
        else:
            self._observed.broken_routes[worker] = broken
        self._observed.log_files[worker] = {
            each["name"].removeprefix(f"{self._cluster.instance}/"): each["log_file"]
            for each in actors
            if "log_file" in each
        }
        there = {(actor["name"], actor["incarnation"]): actor for actor in actors}
        for replica in expected:
            current = self._state.replicas.get(replica.tag)
            if current is not None and current.state is ReplicaState.RUNNING:
                self._look_for(replica, there)
        for replica in self._state.replicas_on(worker):
            actor = there.get((replica.address(self._cluster.instance).name, replica.incarnation))
            if actor is not None and "metrics" in actor:
                now = self._clock.now()
                self._observed.loads.answered(replica.backend, replica.tag, actor["metrics"], now)
                if self._observed.live.is_watched(now):
                    self._observed.live.replica(replica.tag, actor["metrics"], now)
            self._note_facts(replica, {} if actor is None else actor)
            if actor is None or actor["is_healthy"] or replica.tag in self._observed.unhealthy:
                continue
            logger.warning("Replica %s is unhealthy: %s", short_tag(replica.tag), actor["detail"])
            self._observed.unhealthy[replica.tag] = actor["detail"]
            self._observed.last_lines[replica.tag] = tuple(actor.get(LAST_LINES, ()))
            self._enqueue([replica.backend])
        self._miss_proxies(worker, there)
        self._end_orphans(worker, actors)

    def _note_facts(self, replica: ReplicaRecord, actor: Mapping[str, Any]) -> None:
        """Record a replica's activity, its rank, and the user's statistics for routing."""
        if "busy" in actor:
            self._observed.busy[replica.tag] = Activity(*actor["busy"])
        else:
            self._observed.busy.pop(replica.tag, None)
        if actor.get("rank_info"):
            rank_info = as_rank_info(actor["rank_info"])
            if self._observed.rank_infos.get(replica.tag) != rank_info:
                self._observed.rank_infos[replica.tag] = rank_info
                self._enqueue([replica.backend])
        if actor.get("is_leaving") and replica.tag not in self._observed.terminating:
            self._observed.terminating.add(replica.tag)
            self._enqueue([replica.backend])
        if "models" in actor:
            record = self._state.models.get(replica.backend)
            self._observed.learn_models(replica, actor["models"], rollouts_of(record) if record else ())
        if "multiplexed" in actor and self._observed.multiplexed.learn(
            replica.backend, replica.tag, actor["multiplexed"]
        ):
            self._announce()
        if "routing_stats" in actor:
            backend = self._state.backends.get(replica.backend)
            is_used = backend is not None and backend.config.request_router_config is not None
            stats = actor["routing_stats"]
            if self._observed.routing_stats.learn(replica.backend, replica.tag, stats, is_used=is_used):
                self._announce()

    def _look_for(self, replica: ReplicaRecord, there: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
        """Record that a replica runs, or that it should run but has vanished."""
        actor = there.get((replica.address(self._cluster.instance).name, replica.incarnation))
        if actor is not None and actor["is_ready"]:
            if replica.tag not in self._observed.ready:
                self._observed.ready[replica.tag] = {"pid": actor["pid"]}
                self._enqueue([replica.backend])
        elif replica.tag not in self._observed.failed:
            name = short_tag(replica.tag)
            logger.warning("Replica %s vanished from %s", name, replica.worker)
            error = ActorLostError(f"Replica {name} vanished from {replica.worker}.")
            self._observed.failed[replica.tag] = error
            self._enqueue([replica.backend])

    def _miss_proxies(
        self, worker: WorkerAddress, there: Mapping[tuple[str, int], Mapping[str, Any]]
    ) -> None:
        for proxy in self._state.proxies.on(worker):
            actor = there.get((proxy.address(self._cluster.instance).name, proxy.incarnation))
            now = self._clock.now()
            if actor is not None and "metrics" in actor and self._observed.live.is_watched(now):
                self._observed.live.proxy(proxy.tag, actor["metrics"], now)
            facts = self._observed.proxies_ready.get(proxy.name)
            is_known = facts is not None and facts["incarnation"] == proxy.incarnation
            if is_known and actor is None:
                logger.warning("Proxy %s vanished from %s", proxy.tag, worker)
                del self._observed.proxies_ready[proxy.name]
                self._enqueue(None)

    def _end_orphans(self, worker: WorkerAddress, actors: Sequence[Mapping[str, Any]]) -> None:
        instance = self._cluster.instance
        known = {each.address(instance) for each in self._state.replicas_on(worker)}
        known |= {each.address(instance) for each in self._state.proxies.on(worker)}
        for actor in actors:
            address = ActorAddress(actor["name"], worker, actor["incarnation"])
            if actor["kind"] == ActorKind.CONTROLLER:
                is_ours = address.incarnation < self._epoch
            elif actor["kind"] == ActorKind.BUILDER:
                # The builder's controller removes it; a builder has no record.
                is_ours = address.incarnation < self._epoch << EPOCH_BITS
            else:
                is_ours = address.incarnation < self._newest_incarnation
            if is_ours and address not in known:
                logger.warning("Actor %s has no record and is stopped", address)
                self._tasks.spawn(self._end(address), "watch")

    async def _end(self, address: ActorAddress) -> None:
        try:
            # A controller that lost its connection does not know the actors that its successor has adopted.
            await self._confirm_reign()
            await self._cluster.destroy(address, 0)
        except (ServeError, OSError) as error:
            logger.info("Actor %s could not be stopped: %s", address, error)

    def _forget_workers(self) -> None:
        known = set(self._observed.workers)
        if not self._observed.unresponsive <= known:
            self._observed.unresponsive &= known
            self._announce()
        for found in (self._observed.broken_routes, self._observed.log_files):
            for worker in found.keys() - known:
                del found[worker]
        for worker in set(self._misses) - known:
            del self._misses[worker]
