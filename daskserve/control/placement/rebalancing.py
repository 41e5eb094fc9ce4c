"""Rebalancing: decides which replica moves to a better worker, after workers have joined. Pure.

A replica is placed on the worker that is best at the time. Later, another worker may be better:

- A worker with fewer replicas of the same deployment on it, or on its host, has room.
- A worker without replicas has joined, while others have several, or the controller or a proxy.

Then replicas move, one at a time in the whole instance. A new replica starts on the better worker before the
old one stops. Each move makes a worker less crowded, so the moves end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from daskserve.common.types import BackendTag, ReplicaState, ReplicaTag, WorkerAddress, WorkerInfo
from daskserve.control.observed.observed import Notes, Observed
from daskserve.control.placement.placement import TentativeUsage, crowding, demand_of, place, ranks
from daskserve.control.records.bundles import is_on
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.state import State

#: Interval of the searches.
SEARCH_S = 5.0
#: Number of backends that one search checks, and number of them for which it compares all workers.
LOOKS, COMPARISONS = 50, 5


class Rebalancer:
    """Searches the backends, round-robin, for the next move; remembers since when each could improve."""

    def __init__(self) -> None:
        self._since: dict[BackendTag, float] = {}
        #: Workers that have had replicas; only others count as new.
        self._used: set[WorkerAddress] = set()
        self._turns: list[BackendTag] = []
        self._due = 0.0

    def next_move(
        self, state: State, observed: Observed, avoid: Collection[WorkerAddress], now: float
    ) -> ReplicaRecord | None:
        """Return the replica that moves, or None.

        Parameters
        ----------
        avoid
            The workers of the controller and the proxies.
        """
        if now < self._due:
            return None
        self._due = now + SEARCH_S
        self._used = (self._used | state.bundles_on().keys()) & observed.workers.keys()
        # An adaptive cluster removes empty workers, so do not spread replicas to them.
        if observed.moving is not None or observed.is_adaptive:
            return None
        workers = [each for each in observed.cleared_workers() if each.is_available and not each.is_system]
        if len(workers) < 2:
            self._since.clear()
            return None
        new = {each.address for each in workers} - self._used
        worker_loads = _WorkerLoads(state, workers, avoid, new)
        comparisons = 0
        for tag in self._next_turns(state):
            backend, found = state.backends[tag], None
            wait_s = backend.config.rebalance_after_s
            if (
                wait_s is not None
                and _is_steady(state, observed, backend)
                and worker_loads.may_be_better(tag)
            ):
                comparisons += 1
                found = _misplaced(state, workers, backend, avoid, new)
            if found is None or wait_s is None:
                self._since.pop(tag, None)
            elif now >= self._since.setdefault(tag, now) + wait_s:
                return found
            if comparisons >= COMPARISONS:
                break
        return None

    def _next_turns(self, state: State) -> Iterable[BackendTag]:
        """Yield the next backends to check, round-robin."""
        if not self._turns:
            self._turns = sorted(state.backends, reverse=True)
            for gone in self._since.keys() - state.backends.keys():
                del self._since[gone]
        for _ in range(min(LOOKS, len(self._turns))):
            tag = self._turns.pop()
            if tag in state.backends:
                yield tag


def leaving(
    observed: Observed, notes: Notes, replicas: Mapping[ReplicaTag, ReplicaRecord], *, is_busy: bool
) -> tuple[set[ReplicaTag], ReplicaTag | None]:
    """Return the replicas that leave their workers, and a replica that should have moved but cannot.

    A move has the lowest priority: it is cancelled if there is no room, if the new replica does not start, or
    if the backend has anything else to do.
    """
    retiring = observed.retiring_of(replicas.values())
    found = {each.tag for each in replicas.values() if is_on(each, retiring)}
    found |= observed.terminating & replicas.keys()
    moving = observed.moving
    if moving is None or moving not in replicas:
        return found, None
    waits = any(each.state is ReplicaState.SHOULD_START for each in replicas.values())
    if found or is_busy or notes.failures or waits:
        return found, moving
    return {moving}, None


def _is_steady(state: State, observed: Observed, backend: BackendRecord) -> bool:
    """Return whether a backend spreads its replicas and has nothing else to do."""
    app = state.apps.of(backend)
    if backend.goal or backend.is_deleting or (app is not None and app.goal):
        return False
    # Gangs and placement groups are placed together, and other programs may use their bundles.
    if backend.config.packs or backend.gang_size > 1 or backend.bundles or backend.actor_of:
        return False
    notes = observed.notes_of(backend.tag)
    if notes.failures or notes.waiting is not None:
        return False
    replicas = state.replicas_of(backend.tag)
    return len(replicas) == backend.num_replicas and all(
        each.state is ReplicaState.RUNNING and each.version == backend.version for each in replicas
    )


class _WorkerLoads:
    """How crowded the workers are, for a cheap check of many backends."""

    def __init__(
        self,
        state: State,
        workers: Sequence[WorkerInfo],
        avoid: Collection[WorkerAddress],
        new: Collection[WorkerAddress],
    ) -> None:
        self._state = state
        self._workers = {each.address: each for each in workers}
        self._avoid = set(avoid)
        self._least = min((self._crowding(self._workers[each], 0) for each in new), default=None)

    def may_be_better(self, backend: BackendTag) -> bool:
        """Return whether one of a backend's replicas might be better placed on another worker."""
        counts = self._state.workers_of(backend)
        known = [self._workers[each] for each in counts if each in self._workers]
        near: Counter[str] = Counter()
        for worker in known:
            near[worker.host] += counts[worker.address]
        if any(counts[each.address] > 1 or near[each.host] > 1 for each in known):
            return True
        return self._least is not None and any(self._crowding(each, 1) > self._least for each in known)

    def _crowding(self, worker: WorkerInfo, less: int) -> tuple[int, int]:
        count = self._state.count_on(worker.address) - less
        return crowding(worker.threads, count, is_avoided=worker.address in self._avoid)


def _misplaced(
    state: State,
    workers: Sequence[WorkerInfo],
    backend: BackendRecord,
    avoid: Collection[WorkerAddress],
    new: Collection[WorkerAddress],
) -> ReplicaRecord | None:
    """Return the replica of a backend on its worst worker, if another worker is better; None otherwise."""
    trial, demand = TentativeUsage(state, {}), demand_of(backend)
    found = place(trial, workers, demand, avoid)
    known = {each.address for each in workers}
    replicas = [each for each in state.replicas_of(backend.tag) if each.worker in known]
    if found is None or not replicas:
        return None
    (better,) = found
    rank = ranks(trial, workers, demand, avoid)
    worst = max(replicas, key=lambda each: (rank(each.worker or ""), each.tag))
    with trial.without([worst]):
        rank = ranks(trial, workers, demand, avoid)
        there, here = rank(better), rank(worst.worker or "")
    if better in new:
        return worst if there[:-1] < here[:-1] else None
    # only if the worker has other replicas of the same backend
    return worst if there[:2] < here[:2] else None
