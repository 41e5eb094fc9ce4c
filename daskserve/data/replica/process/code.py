"""Process isolation: user code in a child process, with its own interpreter.

The replica's actor stays in its worker and counts the requests. The child runs a whole `Replica`, with its
executor and batches, in a `daskserve.cluster.worker.child.ChildProcess`. This module forwards requests and
verbs to the child. When the child ends, the replica is lost.

The worker may not have the classes of user errors. So errors stay packed (`daskserve.payload.packed_errors`),
and the actor forwards them without unpacking.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import LAST_LINES, ActorContext
from daskserve.cluster.worker.child import ChildProcess, dump_access
from daskserve.common import settings
from daskserve.common.formatting import capitalized
from daskserve.common.types import (
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    Payload,
    RankInfo,
    Receive,
    Send,
    short_tag,
)
from daskserve.data.replica.code_protocol import CLOSE_GRACE_S
from daskserve.data.replica.environment.interpreters import interpreter_of
from daskserve.data.replica.local_code import parts_of
from daskserve.data.replica.logs import replica_log_context
from daskserve.data.replica.models import Models
from daskserve.data.replica.process.inspection import ChildInspection
from daskserve.data.replica.process.listening import listening_children, pass_on
from daskserve.data.replica.process.metrics import ReportedMetrics, poll_metrics
from daskserve.data.replica.process.runner import ChildRunner
from daskserve.data.replica.requests.replica_request import ReplicaRequest
from daskserve.data.replica.requests.slots import Slots, found_at
from daskserve.data.replica.requests.states import RequestEvent
from daskserve.data.replica.user_code.autoscaling_stats import ChildStats
from daskserve.data.replica.user_code.construction import CONSTRUCTING, INSTALLING
from daskserve.errors import ActorLostError, BadRequestError, ReplicaStartError, ServeError
from daskserve.internals.otlp_exporter import post_of
from daskserve.loops.connection_table import LostAttempt
from daskserve.options.start_messages import ReplicaStart, read_config
from daskserve.payload.importing import call_imported
from daskserve.telemetry.logs.ended import ProcessFile
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.carrier import TRACE
from daskserve.telemetry.tracing.enabling import enable
from daskserve.telemetry.tracing.process import Tracing, tracing_of
from daskserve.telemetry.user import UserSample

logger = logging.getLogger("daskserve.replica")

#: The factory of the object that the child serves.
FACTORY = "daskserve.data.replica.process.replica:served_replica"
#: The actor probes its child, so the child does not probe itself.
UNPROBED: Mapping[str, Any] = {"health_check_period_s": 1e9}


class ForwardedRequest(ReplicaRequest):
    """A request that the child answers."""

    __slots__ = ("_code",)

    def __init__(self, code: ChildCode, envelope: Envelope) -> None:
        super().__init__(envelope, code.slots, code.own_metrics)
        self._code = code

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        code = self._code
        child, runner = code.running()
        envelope = self.envelope
        if envelope.queue_timeout is not None and not runner.is_shared():
            envelope = replace(envelope, queue_timeout=None)  # the child has a slot for the request
        parts = (next(code.numbers), envelope, receive, send)
        self.run = runner.start(child.request, parts, contextvars.copy_context(), self)
        return None

    def message(self, value: Load) -> Message | None:
        self._code.note_queued(value.queued)
        return None


class TracedForward(ForwardedRequest):
    """A request whose wait for a slot has a span; the child creates the other spans."""

    __slots__ = ("_wait",)

    def __init__(self, code: ChildCode, envelope: Envelope, tracing: Tracing) -> None:
        super().__init__(code, envelope)
        state = found_at(code.slots, list)
        self._wait = None if state is None else tracing.under(envelope.head[TRACE], "queue", own=state)

    def granted(self) -> None:
        super().granted()
        if self._wait is not None:
            self._wait.end()

    def _close(self, event: RequestEvent) -> None:
        super()._close(event)
        if self._wait is not None and not self._wait.end_ns:
            self._wait.fail(event)
            self._wait.end()


class ChildModels(Models):
    """The models in a child process, as last reported by the child."""

    def __init__(self, call: Callable[..., Awaitable[Any]], ask: Callable[[], Awaitable[Any]]) -> None:
        self._call = call
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self.known: Mapping[str, Any] = {}
        self.known_multiplexed: Mapping[str, Any] = {}

    async def want(self, wanted: Mapping[str, Any]) -> None:
        await self._call("want_models", wanted=wanted)

    def facts(self) -> Mapping[str, Any]:
        return self.known

    def multiplexed(self) -> Mapping[str, Any]:
        # While models load, the controller soon calls this again.
        if self.known_multiplexed and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._refresh(), name="daskserve-child-models")
        return self.known_multiplexed

    async def _refresh(self) -> None:
        with suppress(ServeError, OSError):  # the child is stopped or lost; other code handles that
            await self._ask()


class ChildCode:
    """A `daskserve.data.replica.code_protocol.UserCode` that runs in a child process.

    A child that ends unexpectedly sets `loss`, which the controller reads every second.
    """

    abandoned = loop_blocks = 0  # the child counts these

    def __init__(self, context: ActorContext, start: ReplicaStart, metrics: ReplicaMetrics) -> None:
        self._context = context
        self._start = start
        self.own_metrics = metrics
        self.slots = Slots(start.replica_tag, start.concurrency, metrics)
        self.slots.count_batched = self._count_batched
        #: The numbers that identify requests in the child.
        self.numbers = itertools.count(1)
        #: Why the replica is lost, if its child ended unexpectedly.
        self.loss = ""
        #: The pickled argument of the last call of the user's ``reconfigure``.
        self._user_config = start.user_config
        self._child: ChildProcess | None = None
        self._runner: ChildRunner | None = None
        self._queued = 0
        self._reported = ReportedMetrics()
        self._stats = ChildStats(context.clock)
        self.models = ChildModels(self._call, self._ask)
        self._asking: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        #: Whether the child has received SIGTERM.
        self.is_leaving = False
        self.stage, self.stage_since = INSTALLING, 0.0
        self._has_last_metrics = False
        #: Whether the replica is being stopped while it is healthy.
        self._is_planned = False

    def __repr__(self) -> str:
        return repr(self._child)

    def _count_batched(self) -> int:
        """Return how many requests waited for a batch at the last answer of the child."""
        return min(self._queued, self.slots.ongoing)

    @property
    def inspection(self) -> ChildInspection:
        """Profiles and stacks of the child."""
        return ChildInspection(self._start.replica_tag, self._call, lambda: self._child, self._context.clock)

    def note_queued(self, queued: int) -> None:
        """Record how many requests wait for a batch in the child."""
        self._queued = queued

    # ---- start

    async def start(self) -> Mapping[str, Any]:
        """Start the child, load and construct the user's code in it, and return facts about it.

        Raises
        ------
        BadRequestError
            The backend's Python environment does not exist on this worker.
        VersionMismatchError, InstanceError
            Its interpreter has no daskserve of the same version, or does not run.
        ReplicaStartError
            The user's code failed (the error has the traceback), or ended its process, or its packages
            cannot be installed.
        """
        start = self._start
        enable(self._context, start.tracing, call_imported, post_of)
        interpreter = await interpreter_of(start.environment, settings.process_variables())
        # The time limit starts here, because the installation has a separate one.
        self.stage, self.stage_since = CONSTRUCTING, self._context.clock.now()
        child = self._child = await ChildProcess.start(
            start.replica_tag, interpreter, FACTORY, partial(pass_on, self._context.cluster)
        )
        children = listening_children(self._context.cluster)
        self._runner = ChildRunner(child, self._explain, lambda: children.is_open)
        child.on_end = self._note_end
        if (logs := self._context.logs) is not None:
            tag, instance = start.replica_tag, self._context.spec.instance
            child.on_log_end = lambda file: logs.ended.add(ProcessFile(tag, instance, file))
        try:
            facts = await self._start_child(child)
        except ReplicaStartError as error:
            error.__dict__[LAST_LINES] = child.last_lines()
            raise
        keep_asking = poll_metrics(self.statistics, start.replica_tag, self._context.clock)
        self._asking = asyncio.create_task(keep_asking, name=f"daskserve-metrics-{start.replica_tag}")
        self._waiting = asyncio.create_task(
            _note_leaving(self, child), name=f"daskserve-leaving-{start.replica_tag}"
        )
        children.add(start.backend_tag, start.replica_tag, self._call, child.hand_over)
        return {**facts, "child_pid": child.pid}

    @property
    def process(self) -> ChildProcess | None:
        """The child, whose logs the worker reads."""
        return self._child

    async def _start_child(self, child: ChildProcess) -> Mapping[str, Any]:
        spec = self._context.spec
        unprobed = {**vars(self._start.config), **UNPROBED}
        parts = await parts_of(self._start, self._context.cluster)
        try:
            facts: Mapping[str, Any] = await child.call(
                "start",
                Payload(replace(self._start, config=read_config(unprobed)).encode(), tuple(parts)),
                name=spec.name,
                incarnation=spec.incarnation,
                instance=spec.instance,
                worker=self._context.worker,
                access=dump_access(self._context.cluster),
            )
        except ActorLostError:
            await child.ended.wait()
            what = capitalized(self._start.display_name)
            raise ReplicaStartError(
                f"{what} did not survive its start: its process {child.exit_reason}."
            ) from None
        return facts

    # ---- requests

    def handle(self, envelope: Envelope) -> ReplicaRequest:
        """Return a request that has not begun."""
        if envelope.kind is EnvelopeKind.CONTROL:
            raise BadRequestError(f"A replica takes no requests of kind {envelope.kind!r}.")
        if TRACE in envelope.head and (tracing := tracing_of(self._context.cluster.shared)) is not None:
            return TracedForward(self, envelope, tracing)
        return ForwardedRequest(self, envelope)

    def running(self) -> tuple[ChildProcess, ChildRunner]:
        """Return the child and its runner; raise if the child has ended."""
        if self.loss or self._child is None or self._runner is None:
            raise self.slots.not_running()
        return self._child, self._runner

    async def _explain(self, error: ActorLostError) -> ActorLostError:
        """Return the error for a waiting caller, which describes the end of the child if it has ended."""
        child = self._child
        if child is None or child.is_open:
            return error
        await child.ended.wait()
        loss = self.loss or f"Replica {short_tag(self._start.replica_tag)!r} was stopped."
        return ActorLostError(loss, begun=error.begun, is_planned=self._is_planned)

    def _note_end(self) -> None:
        if self._child is None:
            return
        tag = short_tag(self._start.replica_tag)
        loss = f"Replica {tag!r} is lost: its process {self._child.exit_reason}."
        error = ActorLostError(loss, begun=True, is_planned=self._is_planned)
        lost = LostAttempt(error, self._context.worker)
        listening_children(self._context.cluster).forget(self._start.replica_tag, lost)
        if not self.slots.is_open:
            return
        self.loss = loss
        self.slots.closed_because = self.loss
        self.slots.close()
        crash = f"\n{self._child.crash}" if self._child.crash else ""
        with replica_log_context(self._start, self._context):
            logger.error("%s%s", self.loss, crash, extra={"replica": self._start.replica_tag})

    # ---- verbs

    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Mapping[str, Any],
        rank_info: RankInfo,
        patience_s: float,
    ) -> None:
        """Apply changed options without a restart.

        The child takes no requests while the user's ``reconfigure`` runs. If ``user_config`` has changed,
        this process already refuses requests.
        """
        calls_code = user_config is not None and user_config != self._user_config
        self._user_config = None  # unknown after a failure
        message = {
            "user_config": user_config,
            "concurrency": concurrency,
            "config": {**config, **UNPROBED},
            "rank_info": rank_info,
        }
        if calls_code:
            async with self.slots.quiet(self._context.clock, patience_s):
                await self._call("reconfigure", **message)
        else:
            await self._call("reconfigure", **message, patience_s=patience_s)
        self._user_config = user_config
        self._start = replace(self._start, config=read_config(config))
        self.slots.resize(concurrency)

    async def probe(self) -> None:
        """Return if user code can run and is healthy; fail at once when the child has ended."""
        await self._call("probe")

    async def statistics(self) -> dict[str, Any]:
        """Return the counts of the child and of this process."""
        found = await self._ask()
        return {
            **found,
            "ongoing": self.slots.ongoing + self._reported.direct[0],
            "concurrency": self.slots.concurrency,
            "queued": found["queued"] + self.slots.waiting,
            "refused_total": found["refused_total"] + self.own_metrics.refused,
        }

    async def _ask(self) -> dict[str, Any]:
        """Return the counts of the child, and store its metrics for `samples`."""
        found: dict[str, Any] = await self._call("statistics", has_stats=self._stats.is_wanted)
        listening_children(self._context.cluster).report(self._start.replica_tag, found.pop("listeners", {}))
        self._stats.record(found.pop("custom", {}))
        self._stats.routing = found.pop("routing_stats")
        self.models.known = found.pop("models")
        self.models.known_multiplexed = found.pop("multiplexed")
        self._reported = ReportedMetrics(
            found.pop("samples"),
            found.pop("user_samples"),
            found["latency_counts"],
            found["failed_total"],
            found["queued"],
            found.get("continuous"),
            found.pop("direct", (0, 0)),
        )
        return found

    async def _call(self, verb: str, **message: Any) -> Any:
        child, _ = self.running()
        try:
            return await child.call(verb, **message)
        except ActorLostError as error:
            raise await self._explain(error) from None

    # ---- metrics

    def metrics(self) -> dict[str, Any]:
        """Return the metrics that the controller reads every second for autoscaling."""
        slots, handled = self.slots, self.own_metrics.handled
        return self._reported.brief(slots.ongoing, slots.waiting, handled) | self._stats.metrics()

    def routing_stats(self) -> Mapping[str, Any]:
        """Return the result of the user's ``record_routing_stats``, as last read."""
        return self._stats.routing

    def samples(self, own: list[MetricSample]) -> list[MetricSample]:
        """Return the replica's metrics; those of the child are as last read."""
        reported = self._reported.samples()
        known = {(name, labels) for name, labels, _ in reported}
        found = list(reported)
        for name, labels, value in own:
            if name == "replica_queued_requests":
                found.append(
                    (name, labels, self.slots.waiting)
                )  # the child's own value counts only the requests that wait for batches
            elif name == "replica_ongoing_requests":
                found.append((name, labels, self.slots.ongoing + self._reported.direct[0]))
            elif name == "deployment_rejections" or (name, labels) not in known:
                found.append((name, labels, value))
        return found

    def user_samples(self) -> list[UserSample]:
        """Return the metrics of user code, as last read from the child."""
        return self._reported.user_samples()

    # ---- stop

    async def send_away(self) -> None:
        """Close the WebSockets with code 1001."""
        try:
            await self._context.clock.wait_for(self._call("send_away"), CLOSE_GRACE_S)
        except (ActorLostError, TimeoutError):
            pass  # the child has already ended, or does not answer

    async def drain(self, grace_s: float) -> None:
        """Let the running requests finish for up to ``grace_s``."""
        clock = self._context.clock
        ends_at = clock.now() + grace_s
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        if not self.loss and grace_s > 0 and self._child is not None:
            await self.send_away()
            self._has_last_metrics = True
        await listening_children(self._context.cluster).remove(self._start.replica_tag, grace_s)
        await clock.wait_for(self.slots.wait_until_idle(), max(0.0, ends_at - clock.now()))

    async def destruct(self, grace_s: float, *, is_planned: bool) -> None:
        """Cancel the requests that still run, and destruct the user's object; kill the child if cancelled."""
        self._is_planned = is_planned
        child = self._child
        if child is None or self._runner is None:
            return
        try:
            if self._has_last_metrics:
                with suppress(TimeoutError):  # the counts of its last second are lost
                    await self._context.clock.wait_for(self._ask(), CLOSE_GRACE_S)
            await child.call("stop", grace_s=grace_s, is_planned=is_planned)
        except ActorLostError:
            pass  # the child has already ended
        except asyncio.CancelledError:
            child.kill()
            raise

    async def close(self) -> None:
        """End the child and its process group."""
        await listening_children(self._context.cluster).remove(self._start.replica_tag, 0)
        if self._waiting is not None:
            self._waiting.cancel()
        if self._child is not None and self._runner is not None:
            await self._child.end()
            await self._runner.close()


async def _note_leaving(code: ChildCode, child: ChildProcess) -> None:
    """Wait until a child has received SIGTERM, and record it."""
    try:
        await child.call("until_leaving")
    except ActorLostError:
        return  # the child has ended
    code.is_leaving = True
    logger.info("SIGTERM: the process of %r ends, and is replaced", code)
