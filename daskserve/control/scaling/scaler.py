"""Run the policy of each autoscaled backend at its interval.

The scaler only records its decisions in `Observed`, with the state they are based on. The controller's loop
makes them the backend's target. Users' policies may block, so they run in threads; see
`daskserve.control.scaling.policy_calls`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.cluster.protocols.base import TaskQueues
from daskserve.common import settings
from daskserve.common.clock import Clock
from daskserve.common.copying import replace
from daskserve.common.formatting import counted
from daskserve.common.types import BackendTag
from daskserve.control.observed.observed import Observed, Scaling
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State, display_name
from daskserve.control.scaling import policy_calls
from daskserve.control.scaling.backlog import Backlog
from daskserve.control.scaling.brokers import open_queue
from daskserve.control.scaling.fetching import HTTPFetcher
from daskserve.control.scaling.group_scaler import Groups, Member
from daskserve.control.scaling.policy_calls import PolicyCall, PolicyLoader, ScheduledPolicy, problem_of
from daskserve.control.scaling.prometheus import PrometheusQueries
from daskserve.control.scaling.recorded import autoscaling_of
from daskserve.control.scaling.snapshot import BackendSnapshot
from daskserve.errors import UserCodeError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.telemetry.error_log import SparseLog

T = TypeVar("T")

logger = logging.getLogger("daskserve.autoscaling")

#: How often these policies run for an idle backend that is already at its minimum.
RESTING_S = 5.0
BY_LOAD_ONLY = frozenset({"target_ongoing_requests", "classic", "latency"})
#: Delay until the next check of a backend without running replicas whose last decision is not applied yet.
STARVED_RETRY_S = 0.1
#: A decision that is not applied within this time is repeated. The store may be unavailable, for example.
PENDING_S = 5.0
#: Interval at which the failures of a policy with errors of one class are logged.
LOG_S = 60.0


@dataclass(slots=True, eq=False, kw_only=True)
class _ScaledBackend(ScheduledPolicy[Autoscaler]):
    """The state kept for one backend. ``autoscaler`` is None while its policy is not loaded."""

    is_resting: bool = False
    options: AutoscalingConfig | None = None
    config: AutoscalingConfig | None = None
    autoscaler: Autoscaler | None = None
    #: The target number of replicas at the time of the running policy call.
    called_for: int = 0
    #: The values of PromQL expressions, and the task that polls them.
    queries: PrometheusQueries | None = None
    querying: asyncio.Task[None] | None = None
    #: The broker's queue, if the policy is ``queue``.
    backlog: Backlog | None = None

    def cancel(self) -> None:
        """Cancel all tasks and abandon the policy call."""
        # `super()` without arguments fails in a dataclass with slots.
        ScheduledPolicy.cancel(self)
        if self.querying is not None:
            self.querying.cancel()
        if self.backlog is not None:
            self.backlog.stop()


class Scaler:
    """Runs the policies of all autoscaled backends; see the module.

    Parameters
    ----------
    enqueue
        Makes the controller's loop reconcile some backends.
    tasks
        The queues of tasks that the instance keeps.
    """

    def __init__(
        self,
        state: State,
        observed: Observed,
        clock: Clock,
        enqueue: Callable[[Iterable[str]], None],
        tasks: TaskQueues | None = None,
    ) -> None:
        self._state = state
        self._observed = observed
        self._clock = clock
        self._enqueue = enqueue
        self._tasks = tasks
        self._entries: dict[BackendTag, _ScaledBackend] = {}
        self._wake = asyncio.Event()
        #: Limits the log for policies that fail intermittently, or with a different text each time.
        self._failures = SparseLog(LOG_S)
        self._fetcher: HTTPFetcher | None = None
        #: Abandoned policy calls that still hang.
        self._abandoned: list[PolicyCall[Any]] = []
        self._groups = Groups(
            state,
            clock,
            member_of=self._member_of,
            record=self._record,
            wake=self._wake.set,
            report_abandoned=self._report_abandoned,
        )

    def wake(self) -> None:
        """Check new backends now."""
        self._wake.set()

    def notify_load(self, backends: Iterable[BackendTag]) -> None:
        """Check the idle backends among these, and those without a running replica, now."""
        for tag in backends:
            entry = self._entries.get(tag)
            is_starved = self._state.is_at_zero(tag) or not self._state.has_running(tag)
            if entry is None or entry.is_resting or is_starved:
                self._wake.set()
                if entry is not None and not self._groups.check_now(tag):
                    entry.due = self._clock.now()

    async def run(self) -> None:
        """Run policies until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._sync_entries()
                now = self._clock.now()
                for tag, entry in self._entries.items():
                    if entry.due <= now and entry.checking is None:
                        entry.begin(self._check(tag, entry), tag, self._wake.set)
                waits = [each.due for each in self._entries.values() if each.checking is None]
                due = min((*waits, self._groups.begin_due(now)))
                pause_s = max(0.0, due - now) if due < math.inf else None
                try:
                    await self._clock.wait_for(self._wake.wait(), pause_s)
                except TimeoutError:
                    pass
        finally:
            for entry in self._entries.values():
                entry.cancel()
            self._groups.close()
            if self._fetcher is not None:
                self._fetcher.close()

    def _sync_entries(self) -> None:
        wanted = self._state.autoscaled
        for tag in sorted(self._entries.keys() - wanted):
            entry = self._entries.pop(tag)
            self._report_abandoned(tag, entry.policy_call)
            entry.cancel()
            self._groups.leave(tag)
            self._observed.scalings.pop(tag, None)
            self._observed.loads.forget_backend(tag)
        for tag in sorted(wanted - self._entries.keys()):
            owner = display_name(self._state, tag)
            loader = PolicyLoader[Autoscaler](self._clock, owner, f"daskserve-policy-{tag}")
            self._entries[tag] = _ScaledBackend(due=self._clock.now(), loader=loader)

    async def _check(self, tag: BackendTag, entry: _ScaledBackend) -> None:
        now = self._clock.now()
        entry.due = now + (entry.config.metrics_interval_s if entry.config is not None else 1.0)
        backend = self._state.backends.get(tag)
        if backend is None or backend.is_deleting:
            return
        if self._is_pending(backend):
            if not self._state.has_running(tag):
                entry.due = now + min(STARVED_RETRY_S, entry.due - now)  # more requests may wait by now
            return
        await self._configure(backend, entry)
        if entry.config is not None and entry.config.group is not None:
            entry.due = math.inf  # its group checks it from now on
            return
        snapshot = self._observe(backend, entry)
        entry.is_resting = False
        if entry.autoscaler is None:
            step = snapshot.without_policy(entry.loader.error)
        else:
            step = await self._call_policy(entry, entry.autoscaler, snapshot)
            entry.is_resting = snapshot.sample.is_idle and _can_rest(snapshot, step)
            if entry.is_resting and entry.due > now:
                entry.due = now + max(RESTING_S, entry.autoscaler.config.metrics_interval_s)
        if entry.backlog is not None and entry.backlog.problem:
            step = replace(step, reason=f"{step.reason}; {entry.backlog.problem}")
        self._record(snapshot, step)

    def _is_pending(self, backend: BackendRecord) -> bool:
        """Whether the last decision has not been applied yet; if so, enqueue the loop again."""
        decided = self._observed.scalings.get(backend.tag)
        if decided is None or not decided.is_for(backend) or self._clock.now() - decided.at >= PENDING_S:
            return False
        self._enqueue([backend.tag])
        return True

    def _member_of(self, tag: BackendTag) -> Member | None:
        """Check one backend of a group; return None if it was removed or its options have changed."""
        entry, backend = self._entries.get(tag), self._state.backends.get(tag)
        if entry is None or entry.autoscaler is None or backend is None or backend.is_deleting:
            return None
        if entry.options != backend.autoscaling:
            self._groups.leave(tag)
            entry.due = self._clock.now()
            return None
        snapshot = self._observe(backend, entry)
        return Member(snapshot, entry.autoscaler, self._facts(entry, snapshot), self._is_pending(backend))

    def _observe(self, backend: BackendRecord, entry: _ScaledBackend) -> BackendSnapshot:
        """Sample the backend's load for its autoscaler, and return a snapshot of the backend."""
        tag, loads, now = backend.tag, self._observed.loads, self._clock.now()
        running = [each.tag for each in self._state.running(tag)]
        sample = loads.sample(tag, running, now)
        if entry.backlog is not None:
            sample = replace(sample, backlog=entry.backlog.value())
        if entry.autoscaler is not None:
            ongoing, custom = loads.ongoing(running, now), loads.custom(running, now)
            entry.autoscaler.observe(sample, replica_ongoing=ongoing, custom=custom)
        return BackendSnapshot.of(backend, entry.config, sample, len(running))

    def _facts(self, entry: _ScaledBackend, snapshot: BackendSnapshot) -> dict[str, Any]:
        return {
            "now": self._clock.now(),
            "wall": self._clock.wall(),
            "current": snapshot.running,
            "target": snapshot.target,
            "queries": None if entry.queries is None else entry.queries.values(),
            "bounds": snapshot.bounds,
        }

    async def _configure(self, backend: BackendRecord, entry: _ScaledBackend) -> None:
        """Apply the current options of the backend."""
        if entry.options != backend.autoscaling:
            entry.options = backend.autoscaling
            config = entry.config = autoscaling_of(backend)
            if config is None:
                return
            entry.due = self._clock.now() + config.metrics_interval_s
            entry.loader.error = ""
            for warning in config.warnings():
                logger.warning("The autoscaler of %s: %s", backend.display_name, warning)
            self._watch_queries(backend.tag, config, entry)
            self._watch_queue(backend.tag, config, entry)
            if entry.policy_call is not None:
                # The running call still uses the autoscaler, so drop both; the result of the call must have
                # no effect.
                self._report_abandoned(backend.tag, entry.policy_call)
                entry.policy_call.abandon()
                entry.loader.call = entry.evaluating = entry.autoscaler = None
            if config.group is None:
                self._groups.leave(backend.tag)
                await self._load(backend.tag, config, entry)
            else:
                entry.loader.loaded()
                entry.autoscaler = policy_calls.group_member_autoscaler(backend.tag, config, entry.autoscaler)
                self._groups.join(backend.tag, config)
        elif entry.config is not None and entry.loader.is_due:
            await self._load(backend.tag, entry.config, entry)

    async def _load(self, tag: BackendTag, config: AutoscalingConfig, entry: _ScaledBackend) -> None:
        """Create the entry's autoscaler, or take the result of loading its policy."""
        current, entry.autoscaler = entry.autoscaler, None
        if not policy_calls.is_built_in(config):
            entry.autoscaler = await entry.loader.load(
                policy_calls.configured_autoscaler, tag, config, current
            )
            return
        try:
            entry.autoscaler = policy_calls.configured_autoscaler(tag, config, current)
            entry.loader.loaded()
        except Exception as error:
            # The policy does not exist in this version, or does not accept its arguments.
            entry.loader.failed(error)

    def _report_abandoned(self, whose: str, call: PolicyCall[Any] | None) -> None:
        """Log a hanging policy call that is abandoned."""
        if call is None or not call.is_overdue:
            return
        self._abandoned = [each for each in (*self._abandoned, call) if each.is_running]
        logger.warning(
            "The former autoscaling policy of %s hangs; its thread is abandoned; abandoned threads: %s",
            whose,
            len(self._abandoned),
        )

    def _watch_queries(self, tag: BackendTag, config: AutoscalingConfig, entry: _ScaledBackend) -> None:
        """Start polling the config's PromQL expressions, if it has any."""
        if entry.querying is not None:
            entry.querying.cancel()
        entry.queries = entry.querying = None
        if config.prometheus_address is None or not config.prometheus_queries:
            return
        entry.queries = PrometheusQueries(
            config.prometheus_address,
            config.prometheus_queries,
            fetch=self._http(),
            clock=self._clock,
            interval_s=config.prometheus_interval_s,
            max_age_s=config.prometheus_max_age_s,
            variables=settings.process_variables(),
        )
        entry.querying = asyncio.create_task(entry.queries.run(), name=f"daskserve-promql-{tag}")

    def _watch_queue(self, tag: BackendTag, config: AutoscalingConfig, entry: _ScaledBackend) -> None:
        """Start polling the broker's queue, if the policy is ``queue``."""
        options, current = config.queue_options(), entry.backlog
        if current is not None:
            if current.options == options:
                return
            current.stop()
        entry.backlog = None
        if options is not None:
            fetch = self._http()
            entry.backlog = Backlog(
                display_name(self._state, tag),
                options,
                open_queue=lambda options: open_queue(options, fetch, self._tasks),
                clock=self._clock,
                variables=settings.process_variables(),
            )
            entry.backlog.start()

    def _http(self) -> HTTPFetcher:
        if self._fetcher is None:
            self._fetcher = HTTPFetcher()
        return self._fetcher

    async def _call_policy(
        self, entry: _ScaledBackend, autoscaler: Autoscaler, snapshot: BackendSnapshot
    ) -> ScalingStep:
        facts = self._facts(entry, snapshot)
        if policy_calls.is_built_in(autoscaler.config):
            return autoscaler.step(**facts)
        call = entry.evaluating
        if call is None:
            name = f"daskserve-policy-{autoscaler.name}"
            call = PolicyCall(self._clock, name, policy_calls.run_step, autoscaler, facts)
            entry.called_for = snapshot.target
        try:
            step: ScalingStep = await entry.answer(call)
        except (TimeoutError, UserCodeError) as error:
            return snapshot.without_policy(problem_of(error), error)
        if entry.called_for != snapshot.target:
            entry.due = self._clock.now()
            return snapshot.without_policy(
                f"the policy answered late, for {counted(entry.called_for, 'replica')}"
            )
        return step

    def _record(self, snapshot: BackendSnapshot, step: ScalingStep) -> None:
        backend = snapshot.backend
        before = self._observed.scalings.get(backend.tag)
        decided = Scaling(
            at=self._clock.now(),
            options=backend.autoscaling,
            based_on=backend.num_replicas,
            replicas=step.replicas,
            wanted=step.wanted,
            reason=step.reason,
        )
        decided.note(snapshot.sample, () if before is None else before.samples)
        self._observed.scalings[backend.tag] = decided
        is_new = step.error is not None and (before is None or before.reason != step.reason)
        kind = type(step.error and (step.error.__cause__ or step.error)).__name__
        if is_new and self._failures.take(f"{backend.tag} {kind}", decided.at) is not None:
            logger.error(
                "The autoscaler of %s: %s",
                backend.display_name,
                step.reason,
                exc_info=step.error,
            )
        if decided.is_for(backend):
            logger.info(
                "The autoscaler of %s: %s -> %s replicas: %s",
                backend.display_name,
                decided.based_on,
                step.replicas,
                step.reason,
            )
            self._enqueue([backend.tag])


def _can_rest(snapshot: BackendSnapshot, step: ScalingStep) -> bool:
    """Whether only new requests can change the policy's decision."""
    config, bounds = snapshot.config, snapshot.bounds
    if config is None or bounds is None or config.policy not in BY_LOAD_ONLY:
        return False
    return step.wanted == step.replicas == snapshot.target == bounds.least
