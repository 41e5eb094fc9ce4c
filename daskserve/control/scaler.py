"""Asking each autoscaled backend's policy, in its rhythm, how many replicas there should be.

This only looks and writes down in `Observed` what was decided, and on what it was based; the loop of the
controller makes it the backend's wanted number. Policies of users run in threads: they may block, and then
hold up nobody but themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.autoscaling import Sample
from daskserve.autoscaling_config import BUILT_IN_POLICIES, AutoscalingConfig
from daskserve.clock import Clock
from daskserve.control.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.control.autoscaling.fetching import HTTPFetcher
from daskserve.control.autoscaling.prometheus import PrometheusQueries
from daskserve.control.observed import Observed, Scaling
from daskserve.control.records import BackendRecord
from daskserve.control.scaling import autoscaling_of
from daskserve.control.state import State
from daskserve.figures import LATENCY_BUCKETS_S
from daskserve.payload import load_bytes
from daskserve.types import BackendTag, ReplicaState

logger = logging.getLogger("daskserve.autoscaling")

#: Where nothing happens and these policies have nothing more to give up, they are asked this often.
RESTING_S = 5.0
BY_LOAD_ONLY = frozenset({"target_ongoing_requests", "classic", "latency"})
#: A policy of a user's that has not answered by then is waited for on the side.
ANSWER_S = 5.0
#: A decision that the loop has not made true by then, because the store is away for example, is made anew.
PENDING_S = 5.0


@dataclass(slots=True)
class _Entry:
    """One backend's autoscaler; None while it could not be made."""

    due: float
    is_resting: bool = False
    options: Mapping[str, Any] | None = None
    config: AutoscalingConfig | None = None
    autoscaler: Autoscaler | None = None
    looking: asyncio.Task[None] | None = None
    #: A user's policy at work.
    asking: asyncio.Future[ScalingStep] | None = None
    #: What is known of the values of PromQL expressions, and the task that keeps them fresh.
    queries: PrometheusQueries | None = None
    querying: asyncio.Task[None] | None = None
    error: str = ""

    def give_up(self) -> None:
        """End what is under way; a thread ends when its policy does."""
        for each in (self.looking, self.asking, self.querying):
            if each is not None:
                each.cancel()


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

    def wake(self) -> None:
        """Look at the backends that are new."""
        self._wake.set()

    def note_load(self, backends: Iterable[BackendTag]) -> None:
        """Look now at those of these backends that had nothing to do until now, or have no replica."""
        for tag in backends:
            entry = self._entries.get(tag)
            if entry is None or entry.is_resting or self._state.is_at_zero(tag):
                self._wake.set()
                if entry is not None:
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
                pause_s = max(0.0, min(waits) - now) if waits else None
                try:
                    await self._clock.wait_for(self._wake.wait(), pause_s)
                except TimeoutError:
                    pass
        finally:
            for entry in self._entries.values():
                entry.give_up()
            if self._fetcher is not None:
                self._fetcher.close()

    def _follow(self) -> None:
        wanted = self._state.autoscaled()
        for tag in self._entries.keys() - wanted:
            self._entries.pop(tag).give_up()
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
        decided = self._observed.scalings.get(tag)
        if decided is not None and decided.is_for(backend) and now - decided.at < PENDING_S:
            self._poke([tag])
            return
        await self._configure(backend, entry)
        running = [each.tag for each in self._state.replicas_of(tag) if each.state is ReplicaState.RUNNING]
        loads = self._observed.loads
        sample, ongoing = loads.sample(tag, running, now), loads.ongoing(running, now)
        target = backend.num_replicas
        if entry.autoscaler is None:
            step = ScalingStep(target, target, entry.error)
        else:
            custom = loads.custom(running, now)
            entry.autoscaler.observe(sample, replica_ongoing=ongoing, custom=custom)
            step = await self._ask(entry, entry.autoscaler, current=len(running), target=target)
            entry.is_resting = sample.is_idle and _is_content(entry.autoscaler.config, step, target)
            if entry.is_resting and entry.due > now:
                entry.due = now + max(RESTING_S, entry.autoscaler.config.metrics_interval_s)
        self._decided(backend, step, sample)

    async def _configure(self, backend: BackendRecord, entry: _Entry) -> None:
        """Go by the present options of the backend."""
        if entry.options == backend.autoscaling:
            return
        entry.options = backend.autoscaling
        config = entry.config = autoscaling_of(backend)
        if config is None:
            return
        entry.due = self._clock.now() + config.metrics_interval_s
        entry.error = ""
        self._query(backend.tag, config, entry)
        try:
            if _is_built_in(config):
                entry.autoscaler = _configured(backend.tag, config, entry.autoscaler)
            else:
                entry.autoscaler = await asyncio.to_thread(_configured, backend.tag, config, entry.autoscaler)
        except Exception as error:
            # Whatever a user's module raises when it is imported, or their object when it is unpickled.
            logger.exception("The autoscaling policy of %s cannot be used", backend.tag)
            entry.autoscaler = None
            entry.error = f"the policy cannot be used: {type(error).__name__}: {error}"

    def _query(self, tag: BackendTag, config: AutoscalingConfig, entry: _Entry) -> None:
        """Keep the values of the config's PromQL expressions fresh from now on, if it has any."""
        if entry.querying is not None:
            entry.querying.cancel()
        entry.queries = entry.querying = None
        if config.prometheus_address is None or not config.prometheus_queries:
            return
        if self._fetcher is None:
            self._fetcher = HTTPFetcher()
        entry.queries = PrometheusQueries(
            config.prometheus_address,
            config.prometheus_queries,
            fetch=self._fetcher,
            clock=self._clock,
            interval_s=config.prometheus_interval_s,
            max_age_s=config.prometheus_max_age_s,
        )
        entry.querying = asyncio.create_task(entry.queries.run(), name=f"daskserve-promql-{tag}")

    async def _ask(self, entry: _Entry, autoscaler: Autoscaler, *, current: int, target: int) -> ScalingStep:
        facts: dict[str, Any] = {
            "now": self._clock.now(),
            "wall": self._clock.wall(),
            "current": current,
            "target": target,
            "queries": None if entry.queries is None else entry.queries.values(),
        }
        if _is_built_in(autoscaler.config):
            return autoscaler.step(**facts)
        if entry.asking is None:
            aside = asyncio.to_thread(_ask_aside, autoscaler, facts)
            entry.asking = asyncio.ensure_future(aside)
        try:
            step = await self._clock.wait_for(asyncio.shield(entry.asking), ANSWER_S)
        except TimeoutError:
            reason = f"the policy has not answered for {ANSWER_S:g} s, so nothing changes"
            return ScalingStep(target, target, reason)
        finally:
            if entry.asking.done():
                entry.asking = None
        return step

    def _decided(self, backend: BackendRecord, step: ScalingStep, sample: Sample) -> None:
        before = self._observed.scalings.get(backend.tag)
        decided = Scaling(
            at=self._clock.now(),
            options=backend.autoscaling or {},
            based_on=backend.num_replicas,
            replicas=step.replicas,
            wanted=step.wanted,
            reason=step.reason,
        )
        decided.note(sample, () if before is None else before.samples)
        self._observed.scalings[backend.tag] = decided
        if step.error is not None and (before is None or before.reason != step.reason):
            logger.warning("Backend %s: %s", backend.tag, step.reason)
        if decided.is_for(backend):
            logger.info(
                "Backend %s: %s -> %s replicas: %s", backend.tag, decided.based_on, step.replicas, step.reason
            )
            self._poke([backend.tag])


def _is_built_in(config: AutoscalingConfig) -> bool:
    below = config.policy_kwargs.get("policy", "schedule")
    return config.policy in BUILT_IN_POLICIES and below in BUILT_IN_POLICIES


def _is_content(config: AutoscalingConfig, step: ScalingStep, target: int) -> bool:
    """Whether only requests can make the policy want anything else."""
    return config.policy in BY_LOAD_ONLY and step.wanted == step.replicas == target == config.min_replicas


def _ask_aside(autoscaler: Autoscaler, facts: Mapping[str, Any]) -> ScalingStep:
    # With a loop of its own, should the policy be async.
    return asyncio.run(autoscaler.step_async(**facts))


def _configured(tag: BackendTag, config: AutoscalingConfig, present: Autoscaler | None) -> Autoscaler:
    policy = load_bytes(config.policy) if isinstance(config.policy, bytes) else None
    if present is None:
        return Autoscaler(tag, config, policy=policy, latency_bounds_s=LATENCY_BUCKETS_S)
    present.configure(config, policy=policy)
    return present
