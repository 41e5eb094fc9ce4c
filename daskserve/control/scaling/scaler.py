"""Asking each autoscaled backend's policy, in its rhythm, how many replicas there should be.

This only looks and writes down in `Observed` what was decided, and on what it was based; the loop of the
controller makes it the backend's wanted number. Policies of users run in threads, see
`daskserve.control.scaling.asking`: they may block, and then hold up nobody but themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.clock import Clock
from daskserve.control.observed import Observed, Scaling
from daskserve.control.records import BackendRecord
from daskserve.control.scaled import autoscaling_of
from daskserve.control.scaling import asking
from daskserve.control.scaling.asking import Aside
from daskserve.control.scaling.backlog import Backlog
from daskserve.control.scaling.brokers import open_queue
from daskserve.control.scaling.fetching import HTTPFetcher
from daskserve.control.scaling.group_scaler import Groups, Member
from daskserve.control.scaling.look import Look
from daskserve.control.scaling.prometheus import PrometheusQueries
from daskserve.control.state import State
from daskserve.errors import UserCodeError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.types import BackendTag, ReplicaState

T = TypeVar("T")

logger = logging.getLogger("daskserve.autoscaling.context")

#: Where nothing happens and these policies have nothing more to give up, they are asked this often.
RESTING_S = 5.0
BY_LOAD_ONLY = frozenset({"target_ongoing_requests", "classic", "latency"})
#: A policy that could not be had is tried again so often: its module may be installed by then.
RETRY_S = 30.0
#: A decision that the loop has not made true by then, because the store is away for example, is made anew.
PENDING_S = 5.0


@dataclass(slots=True)
class _Question:
    """A user's policy at work, and the number that it was asked about."""

    target: int
    aside: Aside[ScalingStep]


@dataclass(slots=True)
class _Entry:
    """One backend's autoscaler; None while it could not be made."""

    due: float
    is_resting: bool = False
    options: Mapping[str, Any] | None = None
    config: AutoscalingConfig | None = None
    autoscaler: Autoscaler | None = None
    looking: asyncio.Task[None] | None = None
    #: A user's policy on its way to an autoscaler, and one that is asked; never both.
    loading: Aside[Autoscaler] | None = None
    question: _Question | None = None
    #: What is known of the values of PromQL expressions, and the task that keeps them fresh.
    queries: PrometheusQueries | None = None
    querying: asyncio.Task[None] | None = None
    #: The broker's queue that the policy goes by, if it is that one.
    backlog: Backlog | None = None
    #: Why there is no autoscaler, and when it is tried again.
    error: str = ""
    retry_at: float = math.inf

    @property
    def aside(self) -> Aside[Any] | None:
        """What the user's code is at, if it is at anything."""
        return self.loading if self.question is None else self.question.aside

    def give_up(self) -> None:
        """End what is under way; a thread ends when its policy does."""
        for task in (self.looking, self.querying):
            if task is not None:
                task.cancel()
        if self.backlog is not None:
            self.backlog.stop()
        if self.aside is not None:
            self.aside.leave()


class Scaler:
    """See the module.

    Parameters
    ----------
    poke
        Has the loop look at some backends.
    """

    def __init__(
        self, state: State, observed: Observed, clock: Clock, *, poke: Callable[[Iterable[str]], None]
    ) -> None:
        self._state = state
        self._observed = observed
        self._clock = clock
        self._poke = poke
        self._entries: dict[BackendTag, _Entry] = {}
        self._wake = asyncio.Event()
        self._fetcher: HTTPFetcher | None = None
        #: What hung when it was not wanted any more.
        self._left_behind: list[Aside[Any]] = []
        self._groups = Groups(
            state,
            clock,
            see=self._see,
            decide=self._decided,
            wake=self._wake.set,
            leave_behind=self._leave_behind,
        )

    def wake(self) -> None:
        """Look at the backends that are new."""
        self._wake.set()

    def note_load(self, backends: Iterable[BackendTag]) -> None:
        """Look now at those of these backends that had nothing to do until now, or have no replica."""
        for tag in backends:
            entry = self._entries.get(tag)
            if entry is None or entry.is_resting or self._state.is_at_zero(tag):
                self._wake.set()
                if entry is not None and not self._groups.hurry(tag):
                    entry.due = self._clock.now()

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._follow()
                now = self._clock.now()
                for tag, entry in self._entries.items():
                    if entry.due <= now and entry.looking is None:
                        self._begin(tag, entry)
                waits = [each.due for each in self._entries.values() if each.looking is None]
                due = min((*waits, self._groups.begin_due(now)))
                pause_s = max(0.0, due - now) if due < math.inf else None
                try:
                    await self._clock.wait_for(self._wake.wait(), pause_s)
                except TimeoutError:
                    pass
        finally:
            for entry in self._entries.values():
                entry.give_up()
            self._groups.close()
            if self._fetcher is not None:
                self._fetcher.close()

    def _follow(self) -> None:
        wanted = self._state.autoscaled()
        for tag in self._entries.keys() - wanted:
            entry = self._entries.pop(tag)
            self._leave_behind(tag, entry.aside)
            entry.give_up()
            self._groups.leave(tag)
            self._observed.scalings.pop(tag, None)
            self._observed.loads.forget_backend(tag)
        for tag in wanted - self._entries.keys():
            self._entries[tag] = _Entry(self._clock.now())

    def _begin(self, tag: BackendTag, entry: _Entry) -> None:
        task = entry.looking = asyncio.create_task(self._look(tag, entry), name=f"daskserve-scale-{tag}")

        def done(_: asyncio.Task[None]) -> None:
            entry.looking = None
            if not task.cancelled() and task.exception() is not None:
                logger.error("The autoscaler of %s failed", tag, exc_info=task.exception())
            self._wake.set()

        task.add_done_callback(done)

    async def _look(self, tag: BackendTag, entry: _Entry) -> None:
        now = self._clock.now()
        entry.due = now + (entry.config.metrics_interval_s if entry.config is not None else 1.0)
        backend = self._state.backends.get(tag)
        if backend is None or backend.is_deleting:
            return
        if self._is_pending(backend):
            return
        await self._configure(backend, entry)
        if entry.config is not None and entry.config.group is not None:
            entry.due = math.inf  # its group looks at it from now on
            return
        look = self._take_in(backend, entry)
        entry.is_resting = False
        if entry.autoscaler is None:
            step = look.without_policy(entry.error)
        else:
            step = await self._ask(entry, entry.autoscaler, look)
            entry.is_resting = look.sample.is_idle and _is_content(look, step)
            if entry.is_resting and entry.due > now:
                entry.due = now + max(RESTING_S, entry.autoscaler.config.metrics_interval_s)
        if entry.backlog is not None and entry.backlog.problem:
            step = replace(step, reason=f"{step.reason}; {entry.backlog.problem}")
        self._decided(look, step)

    def _is_pending(self, backend: BackendRecord) -> bool:
        """Whether the loop has still to make true what was decided; it is told again."""
        decided = self._observed.scalings.get(backend.tag)
        if decided is None or not decided.is_for(backend) or self._clock.now() - decided.at >= PENDING_S:
            return False
        self._poke([backend.tag])
        return True

    def _see(self, tag: BackendTag) -> Member | None:
        """Look at one of a group; None if there is nothing to see, or it has other options by now."""
        entry, backend = self._entries.get(tag), self._state.backends.get(tag)
        if entry is None or entry.autoscaler is None or backend is None or backend.is_deleting:
            return None
        if entry.options != backend.autoscaling:
            self._groups.leave(tag)
            entry.due = self._clock.now()
            return None
        look = self._take_in(backend, entry)
        return Member(look, entry.autoscaler, self._facts(entry, look), self._is_pending(backend))

    def _take_in(self, backend: BackendRecord, entry: _Entry) -> Look:
        """Look at the backend, and let its autoscaler have what is seen."""
        tag, loads, now = backend.tag, self._observed.loads, self._clock.now()
        running = [each.tag for each in self._state.replicas_of(tag) if each.state is ReplicaState.RUNNING]
        sample = loads.sample(tag, running, now)
        if entry.backlog is not None:
            sample = replace(sample, backlog=entry.backlog.value())
        if entry.autoscaler is not None:
            ongoing, custom = loads.ongoing(running, now), loads.custom(running, now)
            entry.autoscaler.observe(sample, replica_ongoing=ongoing, custom=custom)
        return Look.at(backend, entry.config, sample, len(running))

    def _facts(self, entry: _Entry, look: Look) -> dict[str, Any]:
        return {
            "now": self._clock.now(),
            "wall": self._clock.wall(),
            "current": look.running,
            "target": look.target,
            "queries": None if entry.queries is None else entry.queries.values(),
            "bounds": look.bounds,
        }

    async def _configure(self, backend: BackendRecord, entry: _Entry) -> None:
        """Go by the present options of the backend."""
        if entry.options != backend.autoscaling:
            entry.options = backend.autoscaling
            config = entry.config = autoscaling_of(backend)
            if config is None:
                return
            entry.due = self._clock.now() + config.metrics_interval_s
            entry.error = ""
            self._query(backend.tag, config, entry)
            self._follow_queue(backend.tag, config, entry)
            if entry.aside is not None:
                # It has the autoscaler in its hands: whatever comes of it is not to be seen.
                self._leave_behind(backend.tag, entry.aside)
                entry.aside.leave()
                entry.loading = entry.question = entry.autoscaler = None
            if config.group is None:
                self._groups.leave(backend.tag)
                await self._load(backend.tag, config, entry)
            else:
                entry.retry_at = math.inf
                entry.autoscaler = asking.configured_in_group(backend.tag, config, entry.autoscaler)
                self._groups.join(backend.tag, config)
        elif entry.config is not None and (entry.loading is not None or self._clock.now() >= entry.retry_at):
            await self._load(backend.tag, entry.config, entry)

    async def _load(self, tag: BackendTag, config: AutoscalingConfig, entry: _Entry) -> None:
        """Make the entry's autoscaler, or see what became of it."""
        entry.retry_at = math.inf
        try:
            if asking.is_built_in(config):
                entry.autoscaler = asking.configured(tag, config, entry.autoscaler)
            else:
                if entry.loading is None:
                    entry.loading = self._aside(tag, asking.configured, tag, config, entry.autoscaler)
                    entry.autoscaler = None
                entry.autoscaler = await entry.loading.wait()
            entry.error = ""
        except TimeoutError:
            before, still = entry.error, f"the policy is still being loaded after {asking.ANSWER_S:g} s"
            place = entry.loading.whereabouts if entry.loading is not None else ""
            entry.error = f"{still}: {place}" if place else still
            if not before.startswith(still):
                logger.warning("Backend %s: %s", tag, entry.error)
            return
        except Exception as error:
            entry.autoscaler = None
            self._note_unusable(tag, entry, error)
        entry.loading = None

    def _note_unusable(self, tag: BackendTag, entry: _Entry, error: Exception) -> None:
        text = str(error) if isinstance(error, UserCodeError) else f"{type(error).__name__}: {error}"
        before, entry.error = entry.error, f"the policy cannot be used: {text}"
        entry.retry_at = self._clock.now() + RETRY_S
        if entry.error != before:
            logger.error("The autoscaling policy of %s cannot be used", tag, exc_info=error)

    def _aside(self, tag: BackendTag, function: Callable[..., T], *args: Any) -> Aside[T]:
        return Aside(self._clock, f"daskserve-policy-{tag}", function, *args)

    def _leave_behind(self, whose: str, aside: Aside[Any] | None) -> None:
        """Tell of a thread that hangs and that nobody waits for from now on."""
        if aside is None or not aside.is_overdue:
            return
        self._left_behind = [each for each in (*self._left_behind, aside) if each.is_running]
        logger.warning(
            "The former autoscaling policy of %s hangs and is left behind in its thread; threads so lost: %s",
            whose,
            len(self._left_behind),
        )

    def _query(self, tag: BackendTag, config: AutoscalingConfig, entry: _Entry) -> None:
        """Keep the values of the config's PromQL expressions fresh from now on, if it has any."""
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
        )
        entry.querying = asyncio.create_task(entry.queries.run(), name=f"daskserve-promql-{tag}")

    def _follow_queue(self, tag: BackendTag, config: AutoscalingConfig, entry: _Entry) -> None:
        """Keep the length of the policy's queue fresh from now on, if it goes by one."""
        options, present = config.queue_options(), entry.backlog
        if present is not None:
            if present.options == options:
                return
            present.stop()
        entry.backlog = None
        if options is not None:
            fetch = self._http()
            entry.backlog = Backlog(
                tag, options, open_queue=lambda options: open_queue(options, fetch), clock=self._clock
            )
            entry.backlog.start()

    def _http(self) -> HTTPFetcher:
        if self._fetcher is None:
            self._fetcher = HTTPFetcher()
        return self._fetcher

    async def _ask(self, entry: _Entry, autoscaler: Autoscaler, look: Look) -> ScalingStep:
        facts, config, target = self._facts(entry, look), autoscaler.config, look.target
        if asking.is_built_in(config):
            return autoscaler.step(**facts)
        if entry.question is None:
            aside = self._aside(autoscaler.name, asking.answer, autoscaler, facts)
            entry.question = _Question(target, aside)
        question = entry.question
        try:
            step = await question.aside.wait()
        except TimeoutError as error:
            problem = f"the policy has not answered for {asking.ANSWER_S:g} s"
            return look.without_policy(problem, error)
        except UserCodeError as error:
            entry.question = None
            return look.without_policy(f"the policy failed: {error}", error)
        entry.question = None
        if question.target != target:
            entry.due = self._clock.now()
            return look.without_policy(f"the policy answered late, for {question.target} replicas")
        return step

    def _decided(self, look: Look, step: ScalingStep) -> None:
        backend = look.backend
        before = self._observed.scalings.get(backend.tag)
        decided = Scaling(
            at=self._clock.now(),
            options=backend.autoscaling or {},
            based_on=backend.num_replicas,
            replicas=step.replicas,
            wanted=step.wanted,
            reason=step.reason,
        )
        decided.note(look.sample, () if before is None else before.samples)
        self._observed.scalings[backend.tag] = decided
        if step.error is not None and (before is None or before.reason != step.reason):
            logger.warning("Backend %s: %s", backend.tag, step.reason)
        if decided.is_for(backend):
            logger.info(
                "Backend %s: %s -> %s replicas: %s", backend.tag, decided.based_on, step.replicas, step.reason
            )
            self._poke([backend.tag])


def _is_content(look: Look, step: ScalingStep) -> bool:
    """Whether only requests can make the policy want anything else."""
    config, bounds = look.config, look.bounds
    if config is None or bounds is None or config.policy not in BY_LOAD_ONLY:
        return False
    return step.wanted == step.replicas == look.target == bounds.least
