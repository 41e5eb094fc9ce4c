"""User code in the replica's own process, behind the executor."""

from __future__ import annotations

import contextvars
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from anyio.to_thread import current_default_thread_limiter

from daskserve.cluster.protocols.base import ContextWith
from daskserve.common.formatting import capitalized
from daskserve.common.types import (
    ActorRequest,
    Envelope,
    EnvelopeKind,
    Payload,
    RankInfo,
    ReplicaRank,
    as_rank_info,
    short_tag,
)
from daskserve.context import (
    HasConnection,
    LoadedModels,
    PlacementBundle,
    RankHolder,
    ReplicaContext,
    current_replica,
)
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.replica.code_protocol import CLOSE_GRACE_S
from daskserve.data.replica.errors.log import FailureLog, keep_loggers_enabled, log_error
from daskserve.data.replica.errors.rules import rule_in
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.health import probe_liveness
from daskserve.data.replica.inspection import LocalInspection
from daskserve.data.replica.logs import ReplicaLogs
from daskserve.data.replica.models import ReplicaModels
from daskserve.data.replica.requests.batches import ReplicaBatches
from daskserve.data.replica.requests.calls import CallRequest, request_class_for
from daskserve.data.replica.requests.chained_values import filled
from daskserve.data.replica.requests.counted import CountedRequest
from daskserve.data.replica.requests.http import LocalHTTPRequest
from daskserve.data.replica.requests.multiplexed import multiplexed_request
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.replica.requests.serving import ServingCode
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.user_code.autoscaling_stats import AUTOSCALING, autoscaling_metrics
from daskserve.data.replica.user_code.class_app import enter_app
from daskserve.data.replica.user_code.construction import (
    LOADING,
    RECONFIGURING,
    Construction,
    Stage,
    destruct,
)
from daskserve.data.replica.user_code.definitions import is_async, takes_rank
from daskserve.data.replica.user_code.recorded_stats import METADATA, StatsRecorder, as_plain, routing_hook
from daskserve.data.replica.user_code.servable import Servable, load_definition, run_hook, run_hook_in_thread
from daskserve.data.tasks.marks import CONSUMER
from daskserve.errors import (
    ActorLostError,
    BadRequestError,
    CodeLoadError,
    ReplicaStartError,
    ServeError,
    UserCodeError,
)
from daskserve.internals.otlp_exporter import post_of
from daskserve.options.start_messages import ReplicaStart, read_config
from daskserve.payload.importing import call_imported
from daskserve.payload.packed_errors import PackedError, known_of, packed_here
from daskserve.payload.parcels import Parcel
from daskserve.payload.pickling import dump_bytes
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.carrier import TRACE
from daskserve.telemetry.tracing.enabling import enable
from daskserve.telemetry.tracing.process import tracing_of
from daskserve.telemetry.user import UserSample

logger = logging.getLogger("daskserve.replica")

RECORDING = Stage(f"running {METADATA}()", f"failed in {METADATA}()")
LOADING_MODELS = Stage("loading its models", "could not load its models")
CHECKING = Stage("running its first health check", "failed its first health check")


async def parts_of(start: ReplicaStart, cluster: HasConnection) -> Sequence[Any]:
    """Return the parts of the parcel of a replica's code; empty if the message contains the code itself."""
    parcel = Parcel.labelled(start.code)
    return () if parcel is None else await cluster.fetch_parcel(start.code_name, parcel)


class LocalCode:
    """A `daskserve.data.replica.code_protocol.UserCode` that runs behind an executor in this process."""

    loss = ""
    process: None = None
    is_leaving = False
    stage_since = 0.0

    def __init__(
        self, context: ContextWith[HasConnection], start: ReplicaStart, metrics: ReplicaMetrics
    ) -> None:
        self._context = context
        self._start = start
        self._metrics = metrics
        self._executor: UserExecutor | None = None
        self._servable: Servable | None = None
        self._serving: ServingCode | None = None
        self._holder = RankHolder(as_rank_info(start.rank_info), vars(start.config)["dask_task_config"])
        self._has_liveness_probe = start.config.liveness is not None
        self.inspection = LocalInspection(
            start.replica_tag, lambda: self._executor, owns_process=context.owns_process
        )
        self.stage = LOADING
        #: The number of AnyIO's threads that were added for this replica.
        self._app_threads = 0
        self._routing = StatsRecorder(
            start.replica_tag, self._parts, context.clock, routing_hook(start.config.request_router_config)
        )
        #: The pickled argument of the last call of the user's ``reconfigure``.
        self._user_config: bytes | None = None
        self._stats = StatsRecorder(start.replica_tag, self._parts, context.clock, AUTOSCALING)
        self._failures = FailureLog(start.replica_tag)
        self._loaded = LoadedModels(context.rng)
        repository: Any = start.config.model_repository
        self.models = ReplicaModels(self._loaded, repository, context.clock)
        self._logs = ReplicaLogs(context.logs, start, context)
        self.slots = Slots(start.replica_tag, start.concurrency, metrics)
        self._batches = ReplicaBatches(
            self._parts,
            BatchLimits(start.config.max_batch_size or 1, start.config.batch_wait_timeout),
            self.slots,
            metrics,
            self._failures,
        )

    @property
    def abandoned(self) -> int:
        return self._executor.abandoned if self._executor else 0

    @property
    def loop_blocks(self) -> int:
        return self._executor.blocked_count if self._executor else 0

    # ---- start

    async def start(self) -> Mapping[str, Any]:
        """Load and construct the user's code, check its health once, and return facts about it.

        Raises
        ------
        ReplicaStartError
            The user's code failed; it carries the traceback.
        """
        start = self._start
        executor = self._executor = UserExecutor(
            short_tag(start.replica_tag),
            contextvars.copy_context(),
            threads=_threads(start.concurrency),
            event_loop=start.config.event_loop,
            is_loop_shared=not start.config.run_sync_in_threadpool,
            inbox=self._context.inbox,
            start_thread=self._context.start_thread,
        )
        executor.is_watched = False
        enable(self._context, start.tracing, call_imported, post_of)
        keep_loggers_enabled()
        self._set_current_replica(None)
        failure: ReplicaStartError | None = None
        metadata: Mapping[str, Any] = {}
        try:
            parts = await parts_of(start, self._context.cluster)
            load = partial(_load, start, parts)
            construction = Construction(
                executor, load, is_async=start.is_async, enter=partial(setattr, self, "stage")
            )
            try:
                servable = await construction.run()
            finally:
                self._servable = construction.servable
            await self._allow_app_threads(executor, servable, start.concurrency)
            self._set_current_replica(servable.target)
            if start.user_config is not None:
                self.stage = RECONFIGURING
                await self._run_reconfigure(executor, servable, start.user_config)
                self._user_config = start.user_config
            if servable.has_hook(METADATA):
                self.stage = RECORDING
                request = await self._run(executor, servable.hook(METADATA))
                metadata = await executor.run_sync(as_plain, request)
            self.stage = LOADING_MODELS
            await self.models.start(executor, servable, start.models)
            executor.is_watched = True
            self.stage = CHECKING
            check = self.probe(construction)
            await self._context.clock.wait_for(check, start.config.health_check_timeout_s)
        except Exception as error:
            failure = self._user_error(self.stage, error)
        if failure is not None:
            # Raised outside of the handler: the traceback of the user's error refers to the user's object.
            raise failure
        self._serve(executor, servable, metadata)
        facts = servable.facts
        return {
            "is_blocking": facts.is_blocking,
            "is_asgi_app": facts.is_asgi_app,
            "accepts_batches": facts.accepts_batches,
            "methods": sorted(facts.methods),
            **facts.rare(),
            **({"metadata": metadata} if metadata else {}),
            **({} if facts.consumer is None else {CONSUMER: dump_bytes(facts.consumer)}),
        }

    def _serve(self, executor: UserExecutor, servable: Servable, metadata: Mapping[str, Any]) -> None:
        start = self._start
        self._serving = ServingCode(
            executor, servable, self._batches, self.slots, self._metrics, self._failures
        )
        self._serving.fill = self._fill
        if servable.facts.accepts_batches:
            self.slots.count_batched = self._batches.queued
        self._serving.place = {
            "replica_tag": start.replica_tag,
            "backend": start.backend_tag,
            "worker": self._context.worker,
            "pid": os.getpid(),
            "metadata": metadata,
        }
        self._serving.configure(start.config, self._logs.note)

    def _set_current_replica(self, servable_object: Any) -> None:
        assert self._executor is not None
        replica = ReplicaContext(
            self._context.spec.instance,
            self._start.backend_tag,
            self._start.replica_tag,
            servable_object,
            self._context.cluster,
            self.slots.concurrency,
            self._metrics,
            self._start.code_name.removeprefix(f"{self._start.backend_tag}@"),
            self._holder,
            actors=self._start.actors,
            actor_of=tuple(self._start.actor_of),
            kind=self._start.kind,
            gang=tuple(self._start.gang),
            bundles=tuple(PlacementBundle(*each) for each in self._start.bundles),
            models=self._loaded,
            slots=self.slots.usage,
            multiplexer=self.models.multiplexer,
        )
        self._executor.context.run(current_replica.set, replica)
        self._executor.context.run(enter_app, servable_object)

    def _user_error(self, stage: Stage, error: Exception) -> ReplicaStartError:
        raised = error.__cause__ if isinstance(error, UserCodeError) else error
        known = known_of(error)
        # the application itself has reported the error
        if isinstance(known, ServeError) and known.user_traceback:
            summary, text = str(known), known.user_traceback
        else:
            summary, text = packed_here(error).summary, packed_here(raised or error).text
        what = capitalized(self._start.display_name)
        # A process that is temporarily unreachable is not an error of the code.
        is_code = stage is LOADING and not (isinstance(error, ServeError) and error.is_retryable)
        kind = CodeLoadError if is_code else ReplicaStartError
        return kind(f"{what} {stage.failed}: {summary}{rule_in(text)}", user_traceback=text)

    async def _allow_app_threads(self, executor: UserExecutor, servable: Servable, concurrency: int) -> None:
        more = concurrency - self._app_threads
        if servable.facts.is_asgi_app and more:
            await executor.run_async(_add_app_threads, more)
            self._app_threads = concurrency

    # ---- requests

    def handle(self, envelope: Envelope) -> ActorRequest:
        """Return a request that has not begun."""
        serving = self._serving
        if serving is None:
            raise self.slots.not_running()
        kind: Any
        if envelope.kind is EnvelopeKind.HTTP:
            kind = LocalHTTPRequest
        elif envelope.kind is EnvelopeKind.CALL:
            kind = request_class_for(envelope.head) if "stream" in envelope.head else CallRequest
        else:
            raise BadRequestError(f"A replica takes no requests of kind {envelope.kind!r}.")
        if self.models.multiplexer.is_used:
            kind = multiplexed_request(kind)
        request: LocalRequest
        if TRACE in envelope.head:
            from daskserve.data.replica.requests.traced import traced_request

            request = traced_request(kind, envelope, serving, tracing_of(self._context.cluster.shared))
        else:
            request = kind(envelope, serving.slots, serving.metrics)
        request.code = serving
        if self._logs.payloads.is_on:
            return self._logs.payloads.sampled(request, CountedRequest if self._loaded.splits else None)
        return CountedRequest(request) if self._loaded.splits else request

    async def _fill(self, payload: Payload, keys: Any) -> Payload:
        context = self._context
        return await filled(payload, keys, lambda: context.cluster.connection, context.spec.instance)

    # ---- verbs

    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Mapping[str, Any],
        rank_info: RankInfo,
        patience_s: float,
    ) -> None:
        """Apply changed options without a restart; see `daskserve.data.replica.replica.Replica`."""
        executor, servable = self._parts()
        options = read_config(config)
        servable.check_batching(options.max_batch_size)
        failure: ReplicaStartError | None = None
        if user_config is not None and (
            user_config != self._user_config or _wants_rank(servable, self._holder.rank_info, rank_info)
        ):
            servable.hook("reconfigure")
            async with self.slots.quiet(self._context.clock, patience_s):
                self._user_config = None  # unknown if reconfigure fails
                before, self._holder.rank_info = self._holder.rank_info, rank_info
                try:
                    await self._run_reconfigure(executor, servable, user_config)
                    self._user_config = user_config
                except Exception as error:
                    self._holder.rank_info = before
                    failure = self._user_error(RECONFIGURING, error)
        if failure is not None:
            raise failure  # raised outside of the handler, as in start()
        self._holder.rank_info = rank_info
        self._has_liveness_probe = options.liveness is not None
        self.slots.resize(concurrency)
        executor.threads.limit = _threads(concurrency)
        await self._allow_app_threads(executor, servable, concurrency)
        self._holder.dask_task_config = vars(options)["dask_task_config"]
        self._set_current_replica(servable.target)
        self._batches.reconfigure(options.max_batch_size, options.batch_wait_timeout)
        await self._logs.configure(config)
        if self._serving is not None:
            self._serving.configure(options, self._logs.note)

    async def probe(self, construction: Construction | None = None) -> None:
        """Return if user code can run, and the user's ``check_health`` does not fail.

        If the event loop or the threads are blocked, it returns late or never, so call it with a timeout.
        With a ``construction``, it waits for the construction instead of running code there again.

        Raises
        ------
        UnavailableError
            All slots are held by cancelled calls that have not ended.
        UserCodeError
            ``check_health`` raised.
        """
        executor, servable = self._parts()
        if self._has_liveness_probe:
            if construction is not None:
                await construction.turned.wait()
            else:
                await probe_liveness(executor, servable, self._start.replica_tag, self.slots.concurrency)
        if servable.is_class and hasattr(servable.target, "check_health"):
            try:
                await self._run(executor, servable.hook("check_health"), is_reserved=True)
            except Exception as error:
                raise UserCodeError(
                    f"check_health() of {self._start.display_name} raised {packed_here(error).summary}"
                ) from error

    async def statistics(self) -> dict[str, Any]:
        """Return the counts of the executor."""
        return {
            "abandoned": self.abandoned,
            "threads": len(self._executor.threads) if self._executor else 0,
            "blocked_loop_total": self.loop_blocks,
        }

    def metrics(self) -> dict[str, Any]:
        """Return the metrics that the controller reads every second for autoscaling."""
        return self._metrics.brief(self.slots.load, partial(autoscaling_metrics, self._stats))

    def routing_stats(self) -> Mapping[str, Any]:
        """Return the last result of the user's ``record_routing_stats``."""
        return self._routing.values()

    def samples(self, own: list[MetricSample]) -> list[MetricSample]:
        """Return the replica's metrics."""
        labels = self._start.labels(self._context.spec.instance)
        return [*own, *self._logs.payloads.samples(), *self.models.multiplexer.samples(labels)]

    def user_samples(self) -> list[UserSample]:
        """Return the metrics of user code."""
        return self._metrics.user_samples(self._start.labels(self._context.spec.instance))

    def _parts(self) -> tuple[UserExecutor, Servable]:
        if self._executor is None or self._servable is None:
            raise ActorLostError(f"Replica {short_tag(self._start.replica_tag)!r} was stopped.", begun=False)
        return self._executor, self._servable

    async def _run_reconfigure(self, executor: UserExecutor, servable: Servable, user_config: bytes) -> None:
        hook = servable.hook("reconfigure")
        rank = {"rank": ReplicaRank(*self._holder.rank_info[:3])} if takes_rank(hook) else {}
        await self._run(executor, partial(hook, **rank), user_config)

    async def _run(
        self, executor: UserExecutor, hook: Callable[..., Any], *pickles: bytes, is_reserved: bool = False
    ) -> Any:
        if is_async(hook):
            return await executor.run_async(run_hook, hook, *pickles)
        threads = executor.reserved if is_reserved else None
        return await executor.run_sync(run_hook_in_thread, hook, *pickles, threads=threads)

    # ---- stop

    async def send_away(self) -> None:
        """Close the WebSockets with code 1001, and end the reservations."""
        if self._serving is not None:
            self._serving.end_reservations()
            self._serving.close_websockets()

    async def drain(self, grace_s: float) -> None:
        """Let the running requests finish for up to ``grace_s``."""
        await self.send_away()
        await self._context.clock.wait_for(self.slots.wait_until_idle(), grace_s)

    async def destruct(self, grace_s: float, *, is_planned: bool) -> None:
        """Cancel the requests that still run, and destruct the user's object."""
        executor, servable = self._executor, self._servable
        if executor is None:
            return
        stopped = f"Replica {short_tag(self._start.replica_tag)!r} was stopped."
        executor.abort_runs(ActorLostError(stopped, is_planned=is_planned))
        await self.models.close(executor, grace_s)
        self._set_current_replica(None)
        # Give cancelled code time to clean up.
        await self._context.clock.wait_for(self.slots.wait_until_idle(), CLOSE_GRACE_S)
        if servable is not None:
            try:
                if executor.is_on_worker_loop:  # other code also uses this loop
                    await self._allow_app_threads(executor, servable, 0)
                await destruct(executor, servable)
            except PackedError as error:
                log_error(error, "The destructor of %r failed", self)

    async def close(self) -> None:
        """End the threads."""
        if self._executor is not None:
            await self._executor.close(CLOSE_GRACE_S)
        self._servable = None
        await self._logs.close()

    def __repr__(self) -> str:
        return f"the code of {self._start.replica_tag}"


async def _add_app_threads(count: int) -> None:
    """Change the number of threads for the plain functions of applications on this loop.

    AnyIO allows FastAPI and Starlette 40 threads for each event loop. Each slot of a replica adds one thread,
    so a request with a slot never waits for the thread of another request.
    """
    current_default_thread_limiter().total_tokens += count


def _load(start: ReplicaStart, parts: Sequence[Any]) -> Servable:
    servable = load_definition(
        start.code,
        parts,
        display_name=start.display_name,
        is_debug=start.debug,
        is_exact=start.is_exact,
    )
    servable.check_batching(start.config.max_batch_size)
    return servable


def _wants_rank(servable: Servable, before: RankInfo, after: RankInfo) -> bool:
    """Return whether a changed rank goes to the user's ``reconfigure``."""
    return before[:3] != after[:3] and takes_rank(servable.hook("reconfigure"))


def _threads(concurrency: int) -> int:
    # One thread more than slots, so that reconfigure() and the destructor need not wait for requests.
    return concurrency + 1
