"""A replica: an actor that runs one copy of a backend's user code.

A replica lives on the worker's loop and consists of:

- `Slots`: how many requests run and wait;
- `HealthWatch`: whether user code can still run;
- `ReplicaMetrics`: its metrics;
- a `UserCode`: the code itself, in this process (`LocalCode`) or in a child process (`ChildCode`).

Each request is a `daskserve.data.replica.requests.replica_request.ReplicaRequest`, which holds a slot until
its user code has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import LAST_LINES, ContextWith, verb, verbs_of
from daskserve.common.clock import stopwatch
from daskserve.common.types import Load, as_rank_info, short_tag, split_deployment_tag
from daskserve.context import HasConnection
from daskserve.data.replica.code_protocol import CLOSE_GRACE_S, UserCode
from daskserve.data.replica.health import HealthWatch
from daskserve.data.replica.inspecting import InspectingVerbs
from daskserve.data.replica.local_code import LocalCode
from daskserve.data.replica.tasks import ReplicaTasks
from daskserve.data.replica.user_code.construction import RECONFIGURING
from daskserve.data.tasks.marks import CONSUMER
from daskserve.options.start_messages import ReplicaStart, read_config
from daskserve.telemetry.logs.ended import ProcessFile
from daskserve.telemetry.logs.process import file_of
from daskserve.telemetry.logs.records import Tags
from daskserve.telemetry.logs.settings import merged
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.user import UserSample

logger = logging.getLogger("daskserve.replica")


class Replica:
    """The `daskserve.cluster.protocols.base.HostedActor` that runs user code.

    Parameters
    ----------
    place : type, optional
        The class of `UserCode`, which decides where user code runs.
    """

    #: Whether this replica consumes tasks if its code is a task consumer; a replica in a child process leaves
    #: that to its actor.
    consumes_tasks = True

    def __init__(
        self, context: ContextWith[HasConnection], place: Callable[..., UserCode] = LocalCode
    ) -> None:
        self._context = context
        self._start = start = ReplicaStart.decode(context.spec.payload)
        self._metrics = ReplicaMetrics()
        self._labels = start.labels(context.spec.instance)
        self._code = place(context, start, self._metrics)
        #: Returns the `ActorRequest` of an envelope, which user code answers.
        self.handle = self._code.handle
        self.slots = self._code.slots
        self._tasks = ReplicaTasks(context, start, self._code)
        self.slots.rank_info = as_rank_info(start.rank_info)
        self._reconfiguring = asyncio.Lock()
        #: The start time of `reconfigure`; None while it does not run.
        self._reconfigures_since: float | None = None
        self._ending: asyncio.Task[None] | None = None
        #: The time limit of the destructor, while it runs.
        self._limit: asyncio.Timeout | None = None
        #: Whether the replica is being stopped while it is healthy.
        self._is_planned = True
        #: The file with its logs, written by its child process if it has one.
        self._log_file = _log_file_of(start, getattr(start.config, "logging_config", None))
        self._health = HealthWatch(
            short_tag(start.replica_tag),
            self.probe,
            context.clock,
            period_s=start.config.health_check_period_s,
            timeout_s=start.config.health_check_timeout_s,
            threshold=start.config.health_check_threshold,
            took=self._metrics.probes.observe,
        )
        looking = InspectingVerbs(context, start, self._code)
        self.verbs = verbs_of(self, looking)

    def __repr__(self) -> str:
        slots = self.slots
        state = "lost" if self._code.loss else "open" if slots.is_open else "closed"
        return (
            f"<Replica {self._start.replica_tag} {state} {slots.ongoing}/{slots.concurrency} {self._code!r}>"
        )

    def stage(self) -> tuple[str, float]:
        """Return the current stage of the start, and when its time limit began.

        See `daskserve.cluster.protocols.base.ReportsStart`.
        """
        return self._code.stage.doing, self._code.stage_since

    async def start(self) -> Mapping[str, Any]:
        """Start the user's code and return facts about it.

        Raises
        ------
        ReplicaStartError
            The user's code failed; it carries the traceback.
        """
        began = stopwatch()
        try:
            facts = dict(await self._code.start())
            self.slots.is_open = True
            if self.consumes_tasks and CONSUMER in facts:
                await self._tasks.start(facts.pop(CONSUMER))
        except BaseException as error:
            self._metrics.start_failures += isinstance(error, Exception)
            await self._end(self._context.clock.now())
            raise
        self._health.start()
        self._metrics.record_start(stopwatch() - began, self._context.clock.wall())
        return {**facts, "rank_info": self.slots.rank_info}

    def load(self) -> Load:
        """Return how many requests run, and how many wait for a slot or for their batch."""
        return self.slots.load()

    # ---- verbs

    @verb
    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Mapping[str, Any],
        rank_info: Sequence[int],
        patience_s: float = 0.0,
    ) -> None:
        """Apply changed options without a restart.

        The user's ``reconfigure`` is called if ``user_config`` has changed. If it takes the rank, it is also
        called when the rank has changed. During this time, the replica takes no requests, so that no request
        runs while a change is incomplete.

        Parameters
        ----------
        config
            The options of the backend, as `daskserve.options.start_messages.dump_config` returns them.
        rank_info
            The replica's rank, and the number of wanted replicas.
        patience_s
            How long ``reconfigure`` waits for the running requests.

        Raises
        ------
        BadRequestError
            The callable has no ``reconfigure`` or takes no batches; nothing is changed.
        ReplicaStartError
            The user's ``reconfigure`` failed; it carries the traceback.
        """
        self._check_open()
        async with self._reconfiguring:
            began = self._reconfigures_since = self._context.clock.now()
            try:
                await self._code.reconfigure(
                    user_config, concurrency, config, as_rank_info(rank_info), patience_s
                )
            finally:
                self._metrics.reconfigurations.observe(self._context.clock.now() - began)
                self._reconfigures_since = None
            self.slots.rank_info = as_rank_info(rank_info)
            self._log_file = _log_file_of(self._start, config.get("logging_config"))
            options = read_config(config)
            if self.slots.is_open:  # the replica may have been stopped in the meantime
                self._health.configure(
                    options.health_check_period_s,
                    options.health_check_timeout_s,
                    options.health_check_threshold,
                )

    @verb
    async def want_models(self, wanted: Mapping[str, Any]) -> None:
        """Start to load the wanted versions of models and to unload others.

        See `daskserve.data.replica.models.Models`.
        """
        self._check_open()
        await self._code.models.want(wanted)

    @verb
    async def statistics(self) -> dict[str, Any]:
        """Return the replica's counts; counts whose names end in ``_total`` never decrease."""
        load = self.load()
        own = {
            "replica_tag": self._start.replica_tag,
            "ongoing": load.ongoing,
            "queued": load.queued,
            "concurrency": self.slots.concurrency,
            **self._metrics.plain(),
        }
        return {**own, **await self._code.statistics()}

    @verb
    async def probe(self) -> None:
        """Return normally if user code can run and the user's ``check_health`` does not fail.

        If the event loop or the threads are blocked, it returns late or never, so call it with a timeout.

        Raises
        ------
        UnavailableError
            All slots are held by cancelled calls that have not ended.
        UserCodeError
            ``check_health`` raised.
        """
        self._check_open()
        await self._code.probe()

    def _check_open(self) -> None:
        if not self.slots.is_open:
            raise self.slots.not_running()

    # ---- metrics

    def samples(self) -> list[MetricSample]:
        """Return the replica's metrics; see `daskserve.telemetry.table.Source`."""
        code, slots = self._code, self.slots
        own = self._metrics.samples(self._labels) + self._metrics.states(
            self._labels,
            load=self.load(),
            concurrency=slots.concurrency,
            abandoned=code.abandoned,
            loop_blocks=code.loop_blocks,
            probe_failures=self._health.failures_total,
            is_healthy=self._health.is_healthy and not code.loss,
        )
        return code.samples(own + self._tasks.samples(self._labels))

    def user_samples(self) -> list[UserSample]:
        """Return the metrics of user code; see `daskserve.metrics`."""
        return self._code.user_samples()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics that the controller reads every second for autoscaling."""
        return self._code.metrics()

    def health(self) -> dict[str, Any]:
        """Return the results of the replica's probes, its rank and requests, and the user's statistics."""
        load, loss = self.load(), self._code.loss
        facts = {**self._health.facts(), "rank_info": self.slots.rank_info}
        # Abandoned calls do not count, because no caller waits for them.
        facts["ongoing"] = max(0, load.ongoing - self._code.abandoned) + load.queued
        if self._code.is_leaving:
            facts["is_leaving"] = True
        if models := self._code.models.facts():
            facts["models"] = models
        if multiplexed := self._code.models.multiplexed():
            facts["multiplexed"] = multiplexed
        if stats := self._code.routing_stats():
            facts["routing_stats"] = stats
        if self._log_file is not None:
            facts["log_file"] = self._log_file
        if self._reconfigures_since is not None:
            facts["busy"] = RECONFIGURING.doing, self._context.clock.now() - self._reconfigures_since
        if loss:
            facts |= {"is_healthy": False, "detail": loss}
        process = self._code.process
        if not facts["is_healthy"] and process is not None and (lines := process.last_lines()):
            facts[LAST_LINES] = lines
        return facts

    def log_file(self) -> ProcessFile | None:
        """Return the file with the logs of its child process; see `ReportsLogs`."""
        process = self._code.process
        file = None if process is None else process.log_file
        tag, instance = self._start.replica_tag, self._context.spec.instance
        return None if file is None else ProcessFile(tag, instance, file)

    # ---- stop

    async def send_away(self) -> None:
        """Close the open WebSockets with code 1001."""
        await self._code.send_away()

    async def stop(self, grace_s: float) -> None:
        """Refuse requests, let running ones finish for ``grace_s``, cancel the rest, and destruct the object.

        The destructor has the rest of the grace period, and one second at least.
        """
        ends_at = self._context.clock.now() + grace_s
        self._tasks.pause()
        self.slots.close()
        await self._health.stop()
        try:
            await self._code.drain(grace_s)
        except TimeoutError:
            logger.info("%r cancels the requests that still run after %s s", self, grace_s)
        await self.end(ends_at - self._context.clock.now(), is_planned=self._health.is_healthy)

    async def end(self, grace_s: float, *, is_planned: bool) -> None:
        """Refuse requests, cancel running ones, and destruct within ``grace_s``, but at least one second."""
        self._is_planned = is_planned
        self._tasks.pause()
        self.slots.close()
        await self._health.stop()
        await self._end(self._context.clock.now() + grace_s)

    async def _end(self, ends_at: float) -> None:
        # One task for all callers, so that a cancelled stop() leaves nothing behind.
        ends_at = max(ends_at, self._context.clock.now() + CLOSE_GRACE_S)
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._tear_down(ends_at))
        elif self._limit is not None and ends_at < (self._limit.when() or 0):
            self._limit.reschedule(ends_at)  # this caller has an earlier time limit
        await asyncio.shield(self._ending)

    async def _tear_down(self, ends_at: float) -> None:
        began = stopwatch()
        try:
            async with asyncio.timeout_at(ends_at) as self._limit:
                await self._code.destruct(ends_at - self._context.clock.now(), is_planned=self._is_planned)
        except TimeoutError:
            logger.warning("%r does not end; its threads are abandoned, or its process is killed", self)
        finally:
            self._limit = None
        await self._tasks.close(CLOSE_GRACE_S)
        await self._code.close()
        self.slots.end_wait()
        self._metrics.shutdowns.observe(stopwatch() - began)


def _log_file_of(start: ReplicaStart, config: Mapping[str, Any] | None) -> str | None:
    tags = Tags(*split_deployment_tag(start.backend_tag), start.replica_tag)
    return file_of(merged(config), tags)
