"""The loop: observe, ask the pure parts, write, act, notify.

Changes wake the loop (a verb, a worker that joined or left, an action that ended), with a slow tick as a
fallback. Each tick checks a part of the backends, so that its cost does not grow with their number.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import EPOCH_BITS
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.clock import Clock, stopwatch
from daskserve.common.types import Location, ReplicaState, WorkerAddress
from daskserve.control.action_executor import ACTION_RETRY_S, ActionExecutor, Commit
from daskserve.control.backend import application as app_state
from daskserve.control.backend import gangs
from daskserve.control.backend import step as backend_state
from daskserve.control.backend.actions import ReconfigureReplica
from daskserve.control.backend.inputs import Step, StepInputs, unplaced
from daskserve.control.observed.observed import Observed
from daskserve.control.placement.claims import claims
from daskserve.control.placement.cluster_demand import workers_needed
from daskserve.control.placement.placement import Demand, place
from daskserve.control.placement.rebalancing import Rebalancer
from daskserve.control.proxies import shutdown_order as departure
from daskserve.control.proxies import step as http_state
from daskserve.control.proxies.take_over import Listening, ListenRules
from daskserve.control.records.records import BackendRecord, Change
from daskserve.control.records.state import State, display_name
from daskserve.control.views.metrics import ControlMetrics
from daskserve.errors import ServeError, StaleEpochError
from daskserve.loops.tasks import pause
from daskserve.options.actor import ActorOptions
from daskserve.payload.error_text import summary_of

logger = logging.getLogger("daskserve.controller")

#: Interval of the ticks.
TICK_S = 5.0
#: Number of backends that a tick checks.
TICK_SLICE = 50
#: Number of backends whose changes are written as one transaction.
BATCH = 50
#: Interval at which a failure that repeats is logged again.
LOG_S = 30.0

#: Represents the proxies among the tags of backends; a backend's tag is never empty.
PROXIES = ""


class Reconciler:
    """Reconciles the running actors with the target state.

    Parameters
    ----------
    commit
        `daskserve.control.records.storing.writer.Writer.note`: writes a change to the store, applies it to
        the state and notifies, or raises and does none of these.
    lock
        Held while a change is decided and committed, by this loop and by the controller's verbs alike.
    """

    def __init__(
        self,
        state: State,
        observed: Observed,
        executor: ActionExecutor,
        clock: Clock,
        rng: random.Random,
        *,
        commit: Commit,
        lock: AbstractAsyncContextManager[Any],
        worker: WorkerAddress,
        rules: http_state.ProxyRules,
        listen_rules: ListenRules,
        epoch: int,
    ) -> None:
        self._state = state
        self._observed = observed
        self._executor = executor
        self._clock = clock
        self._rng = rng
        self._commit = commit
        self._lock = lock
        self._worker = worker
        self._rules = rules
        self._incarnation = epoch << EPOCH_BITS
        self._epoch = epoch
        self._dirty: set[str] = set()
        self._dirty_all = True
        self._to_tick: list[str] = []
        self._rebalancer = Rebalancer()
        self._wake = asyncio.Event()
        self._wake_at: dict[str, float] = {}
        self._listen_rules = listen_rules
        self._listening = listen_rules.first
        self.metrics = ControlMetrics()

    def reconfigure_replicas(self) -> None:
        """Send all running replicas their options again, after a change of the instance's options."""
        for replica in self._state.replicas.values():
            if replica.state is ReplicaState.RUNNING:
                self._executor.act(ReconfigureReplica(replica))

    def enqueue(self, backends: Iterable[str] | None = None) -> None:
        """Check these backends (None: everything) as soon as possible."""
        if backends is None:
            self._dirty_all = True
        else:
            self._dirty.update(backends)
        self._wake.set()

    async def close_proxies(self, grace_s: float) -> None:
        """Stop all proxies permanently; return once their requests have ended, or after the grace period."""
        async with self._lock:
            self._listening = Listening.NO_MORE
            proxies = list(self._state.proxies.values())
        await self._executor.close_proxies(proxies, grace_s)

    async def run(self) -> None:
        """Run until cancelled; a step that fails is logged and retried."""
        while True:
            began = stopwatch()
            try:
                await self.step()
                self.metrics.observe_round(stopwatch() - began)
                pause_s = self._pause_s()
            except StaleEpochError:
                logger.warning("A newer controller has taken over; this one ends")
                return
            except Exception:
                # This is the top-level loop: a faulty backend or an unreachable store must not end it.
                logger.exception("A control step failed; it is retried in %s s", ACTION_RETRY_S)
                self.metrics.failures += 1
                self._dirty_all = True
                self._wake.set()
                await self._clock.sleep(ACTION_RETRY_S)
                continue
            try:
                await self._clock.wait_for(self._wake.wait(), pause_s)
            except TimeoutError:
                if pause_s >= TICK_S:
                    self._tick()

    def _tick(self) -> None:
        if not self._to_tick:
            self._to_tick = sorted(self._state.backends)
        self._dirty.add(PROXIES)
        self._dirty.update(self._to_tick[:TICK_SLICE])
        del self._to_tick[:TICK_SLICE]

    def _pause_s(self) -> float:
        now = self._clock.now()
        return min([TICK_S, *(max(0.0, at - now) for at in self._wake_at.values())])

    async def step(self) -> None:
        """Step everything that is marked or due, once."""
        self._wake.clear()
        now = self._clock.now()
        dirty, self._dirty = self._dirty, set()
        if self._dirty_all:
            self._dirty_all = False
            dirty = {PROXIES, *self._state.backends}
        dirty.update(tag for tag, at in self._wake_at.items() if at <= now)
        for tag in dirty:
            self._wake_at.pop(tag, None)
        if PROXIES in dirty:
            dirty.discard(PROXIES)
            if self._listening is Listening.NOW:
                await self._attempt([PROXIES], self._step_proxies())
        moving = self._rebalancer.next_move(self._state, self._observed, self.workers_to_avoid(), now)
        if moving is not None:
            logger.info(
                "Moving replica %s: other workers are less crowded than %s", moving.tag, moving.worker
            )
            self._observed.moving = moving.tag
            self.metrics.moves += 1
            dirty.add(moving.backend)
        tags = sorted(dirty)
        while tags:
            some, tags = tags[:BATCH], tags[BATCH:]
            tags = await self._attempt(some, self._step_backends(some)) + tags
            await pause()  # a step that changes nothing does not suspend, so let other tasks run
        if self._listening is Listening.LATER and self._listen_rules.are_met(self._state, self._observed):
            self._listening = Listening.NOW
            self.enqueue()
        self._forget_lost_workers()
        self._report()

    async def _attempt(self, tags: list[str], stepping: Awaitable[list[str]]) -> list[str]:
        """Run a step; return the backends that are left; no backends if the step or the store fails."""
        try:
            return await stepping
        except StaleEpochError:
            raise
        except Exception as error:
            for tag in tags:
                self._failed_step(tag, error)
            return []

    def _failed_step(self, tag: str, error: Exception) -> None:
        self.metrics.failures += 1
        what = "the proxies" if tag == PROXIES else display_name(self._state, tag)
        is_expected = isinstance(error, (ServeError, OSError))
        # A full disk fails every step of every backend until there is room.
        level = logging.ERROR if self._is_news(tag, repr(error)) else logging.DEBUG
        text = "A control step of %s failed; trying again in %s s: %r"
        logger.log(level, text, what, ACTION_RETRY_S, error, exc_info=not is_expected)
        if not is_expected and tag != PROXIES:
            self._observed.step_failures[tag] = f"the controller fails: {summary_of(error)}"
        self._wake_at[tag] = self._clock.now() + ACTION_RETRY_S

    def _is_news(self, tag: str, failure: str) -> bool:
        before, since = self._observed.logged_failures.get(tag, ("", 0.0))
        now = self._clock.now()
        if failure == before and now - since < LOG_S:
            return False
        self._observed.logged_failures[tag] = failure, now
        return True

    def _report(self) -> None:
        """Report the resources that the instance uses to the scheduler, if they have changed."""
        waiting = [
            gangs.demand_of_gang(backend, gang)
            for tag, notes in self._observed.notes.items()
            if notes.waiting is not None and (backend := self._state.backends.get(tag)) is not None
            for gang in gangs.by_gang(unplaced(self._state.replicas_of(tag)))
        ]
        more = workers_needed(waiting, self._observed.workers.values()) if waiting else 0
        retiring = self._observed.retiring()
        report = UsageReport(
            frozenset(self._state.workers_in_use()),
            frozenset(retiring),
            more,
            frozenset(self._state.proxies.workers),
            frozenset(http_state.held_workers(self._state, self._rules.location)),
            # This iterates over all backends, so compute it only when it is needed.
            departure.grace_s(self._state) if retiring else 0.0,
            {worker: dict(amounts) for worker, amounts in self._state.occupied.by_replicas.items()},
            claims(self._state, self._observed.cleared_workers(), waiting) if waiting else {},
        )
        self._executor.report_usage(self._epoch, report)

    async def _step_backends(self, tags: list[str]) -> list[str]:
        """Step some backends and write all changes as one transaction; return the backends that are left.

        Many replicas start at once when an application is deployed, and a transaction takes much longer than
        a step. So when a deployment comes up, the deployments that wait for it start in the same transaction.
        A step that changes more than its own backend and replicas depends on the records of other backends,
        so it is written separately. The step that completes an application depends only on records of that
        application, so it is written together with steps of other applications.
        """
        async with self._lock:
            taken, change, left = self._decide_some(tags)
            causes = {key: why for _, step in taken for key, why in step.causes.items()}
            await self._commit(change, partial(self._learn, taken), causes)
        later = {backend.tag for backend, _ in taken}
        for backend, step in taken:
            later.discard(backend.tag)
            if step.wake_at is not None:
                self._wake_at[backend.tag] = step.wake_at
            for message in step.messages:
                logger.info("%s", message)
            for action in step.actions:
                self._executor.act(action)
            again = self._affected(backend, step.change, later)
            if again:
                self._dirty |= again
                self._wake.set()
        return left

    def _decide_some(self, tags: Iterable[str]) -> tuple[list[tuple[BackendRecord, Step]], Change, list[str]]:
        """Return the steps that are written together, their change, and the backends that are left."""
        taken: list[tuple[BackendRecord, Step]] = []
        change: Change = {}
        left = list(tags)
        seen = set(left)
        #: The applications that a step has changed, and those that a step has completed.
        changed: set[str] = set()
        complete: set[str] = set()
        avoid = self.workers_to_avoid()
        while left:
            backend = self._state.backends.get(left[0])
            name = "" if backend is None else backend.application
            if name and name in complete:
                break  # the next transaction reads the completed records
            step = None if backend is None else self._decide(backend, change, avoid)
            if backend is not None and step is not None:
                is_own = step.is_own(backend)
                joins = is_own or (name not in changed and app_state.completes(backend, step.change))
                if change and not joins:
                    break
                # Keep them even if the commit fails, because the store may still have these numbers.
                self._incarnation = step.incarnation
                change |= step.change
                taken.append((backend, step))
                if not joins:
                    left.pop(0)
                    break
                if step.change:
                    (changed if is_own else complete).add(name)
                released = app_state.released(self._state, backend, step.change) if is_own else ()
                more = [tag for tag in released if tag not in seen]
                seen.update(more)
                left += more
            left.pop(0)
        return taken, change, left

    def _decide(self, backend: BackendRecord, undone: Change, avoid: set[WorkerAddress]) -> Step | None:
        """Return the step of a backend, given changes that are not applied yet; None if it fails."""
        world = StepInputs(
            state=self._state,
            observed=self._observed,
            now=self._clock.now(),
            seed=self._rng.getrandbits(64),
            incarnation=self._incarnation,
            avoid=avoid,
            wall=self._clock.wall(),
            undone=undone,
        )
        try:
            return backend_state.step(world, backend)
        except Exception as error:
            # A faulty backend must not hold up the others.
            self._failed_step(backend.tag, error)
            return None

    def _learn(self, taken: list[tuple[BackendRecord, Step]]) -> None:
        changed = []
        for backend, step in taken:
            if self._observed.notes_of(backend.tag).unloadable != step.notes.unloadable:
                changed.append(backend.tag)
            for key, notes in ({backend.tag: step.notes} | step.kept).items():
                self._observed.learn(key, notes)
            self._observed.step_failures.pop(backend.tag, None)
        if changed:
            self._executor.announce(changed)

    def _affected(self, backend: BackendRecord, change: Change, later: set[str]) -> set[str]:
        """Return the backends that a change from a backend's step affects.

        ``later`` are the backends that were stepped after it for the same transaction.
        """
        if not change:
            return set()
        found = {name for kind, _, name in (key.partition("/") for key in change) if kind == "backend"}
        current = self._state.backends.get(backend.tag)
        if current is None or (current.goal, current.is_deleting) == (backend.goal, backend.is_deleting):
            # Unless the goal has ended, perhaps with a rollback, which needs another step.
            found.discard(backend.tag)
        return found.union(app_state.neighbours(self._state, current or backend, change, later))

    async def _step_proxies(self) -> list[str]:
        async with self._lock:
            step = http_state.step(
                self._state,
                self._observed,
                self._rules,
                incarnation=self._incarnation,
                now=self._clock.now(),
            )
            self._incarnation = step.incarnation
            await self._commit(step.change, partial(self._observed.learn_proxies, step.lost, step.apart))
        for message in step.messages:
            logger.warning("%s", message)
        if step.wake_at is not None:
            self._wake_at[PROXIES] = step.wake_at
        for action in step.actions:
            self._executor.act_on_proxy(action)
        return []

    def workers_to_avoid(self) -> set[WorkerAddress]:
        """Return the workers that get replicas last, because of the controller and the proxies."""
        if self._rules.location is Location.EVERY_WORKER:
            return {self._worker}  # replicas should be near the proxies
        return {self._worker, *self._state.proxies.workers}

    def next_worker(self) -> WorkerAddress | None:
        """Return the worker that would get a replica with default options; None if no worker has room."""
        workers = self._observed.cleared_workers()
        found = place(self._state, workers, Demand("", (ActorOptions().demand(),)), self.workers_to_avoid())
        return None if found is None else found[0]

    def _forget_lost_workers(self) -> None:
        lost = self._observed.lost_workers
        if lost:
            seen_to = lost - self._state.workers_in_use()
            lost -= seen_to
            if not seen_to.isdisjoint(self._observed.workers):
                self.enqueue()  # a worker that rejoined under its old address is usable from now on
