"""Placement: which workers get a replica, or the bundles of a placement group or gang.

Dask reserves no resources for actors, so this module compares the resources that a worker declares with the
requests of the replicas placed on it, and with the resources that Dask's tasks hold.

A worker must be available and allowed, and must have room. It must not be one of the ``system_workers``,
which are for the controller and the proxies. Its host must have fewer replicas than
``max_replicas_per_node``. These criteria, in this order, decide among the remaining workers:

1. The worker has the fewest replicas of the same backend.
2. Its host has the fewest replicas of the same backend.
3. It has fewer replicas than threads, and neither the controller nor a proxy.
4. It has fewer replicas than threads.
5. It has the fewest replicas; the controller or a proxy counts as `SYSTEM_ACTOR_WEIGHT` replicas.

With ``placement="PACK"``, the order is: the most replicas of the same backend on the worker, then on its
host, then neither the controller nor a proxy, then the most replicas. Ties are resolved by address, so the
result is repeatable.

Bundles that are placed together, all or none, form one `Demand`; see
`daskserve.control.placement.bin_packing`. A replica is one bundle, or those of its placement group; a gang is
the bundles of all its replicas.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from daskserve.common.formatting import counted, shown, shown_size
from daskserve.common.types import BackendTag, WorkerAddress, WorkerInfo
from daskserve.control.placement.bin_packing import (
    TOLERANCE,
    Amounts,
    FreeResources,
    by_host,
    fill,
    fit,
    total,
)
from daskserve.control.records.bundles import places_of
from daskserve.control.records.records import BackendRecord, Change, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.options.placement import Strategy

#: Number of replicas that the controller or a proxy counts as.
SYSTEM_ACTOR_WEIGHT = 2
#: The workers that replicas spread over, in order: those that have fewer replicas than threads, then such
#: workers with the controller or a proxy, then all others.
FREE, AVOIDED, FULL = range(3)

#: A sort key of workers, the best first; see `ranks`.
WorkerRank: TypeAlias = tuple[int, int, int, int, WorkerAddress]


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources and workers for replicas that are placed together.

    Attributes
    ----------
    bundles : tuple of mapping
        The amounts of each bundle by resource: the bundles of the first replica, then of the next one.
    is_packed : bool
        Whether to prefer workers with other replicas of the backend.
    strategy
        The strategy of the placement group: together or apart.
    replicas : int
        The number of these replicas.
    """

    backend: BackendTag
    bundles: tuple[Amounts, ...]
    allowed_workers: tuple[str, ...] | None = None
    most_per_host: int | None = None
    is_packed: bool = False
    strategy: Strategy = "PACK"
    replicas: int = 1

    @property
    def has_groups(self) -> bool:
        """Whether a replica has more than one bundle."""
        return len(self.bundles) > self.replicas


class TentativeUsage:
    """The resource usage of a state with a change that has not been applied yet."""

    def __init__(self, state: State, change: Change) -> None:
        self._state = state
        self._used: dict[WorkerAddress, dict[str, float]] = {}
        self._counts: Counter[WorkerAddress] = Counter()
        self._counts_of: dict[BackendTag, Counter[WorkerAddress]] = {}
        for key, record in change.items():
            kind, _, tag = key.partition("/")
            if kind != ReplicaRecord.KIND:
                continue
            old = state.replicas.get(tag)
            if old is not None:
                self._count(old, -1)
            if isinstance(record, ReplicaRecord):
                self._count(record, 1)

    def occupy(
        self, backend: BackendTag, worker: WorkerAddress, amounts: Mapping[str, float], count: int = 1
    ) -> None:
        """Add a bundle on a worker; a ``count`` of -1 removes one."""
        used = self._used.setdefault(worker, dict(self._state.used(worker)))
        for name, amount in amounts.items():
            used[name] = used.get(name, 0) + count * amount
        self._counts[worker] += count
        self._counts_of.setdefault(backend, Counter())[worker] += count

    def _count(self, replica: ReplicaRecord, count: int) -> None:
        for worker, amounts in places_of(replica):
            self.occupy(replica.backend, worker, amounts, count)

    @contextmanager
    def without(self, replicas: Iterable[ReplicaRecord]) -> Iterator[None]:
        """Exclude some replicas inside a ``with`` block."""
        known = list(replicas)
        for each in known:
            self._count(each, -1)
        yield
        for each in known:
            self._count(each, 1)

    def used(self, worker: WorkerAddress) -> Mapping[str, float]:
        """Return the amounts that the replicas on a worker occupy, by resource."""
        return self._used[worker] if worker in self._used else self._state.used(worker)

    def used_by_replicas(self, worker: WorkerAddress) -> Mapping[str, float]:
        """Return the part of `used` that Dask's tasks cannot use; it includes all changes."""
        own, before = self._state.used_by_replicas(worker), self._state.used(worker)
        used = self._used.get(worker, {})
        return {**own, **{name: own.get(name, 0) + used[name] - before.get(name, 0) for name in used}}

    def bundles_on(self) -> Mapping[WorkerAddress, int]:
        """Return the workers that hold bundles, each with their number."""
        return _sum(self._state.bundles_on(), self._counts)

    def workers_of(self, backend: BackendTag) -> Mapping[WorkerAddress, int]:
        """Return the workers that hold bundles of a backend, each with their number."""
        return _sum(self._state.workers_of(backend), self._counts_of.get(backend, {}))


def _sum(
    known: Mapping[WorkerAddress, int], changes: Mapping[WorkerAddress, int]
) -> Mapping[WorkerAddress, int]:
    if not changes:
        return known
    return {**known, **{worker: known.get(worker, 0) + change for worker, change in changes.items()}}


#: The resources that replicas occupy.
ResourceUsage: TypeAlias = State | TentativeUsage


def capacity(worker: WorkerInfo) -> dict[str, float]:
    """Return a worker's amounts by resource: its threads as CPU, its memory, and its declared resources."""
    # Dask reports 0 for a worker without a memory limit.
    memory = float(worker.memory_bytes) or math.inf
    return {"CPU": float(worker.threads), "memory": memory, **worker.resources}


def is_allowed(worker: WorkerInfo, allowed: tuple[str, ...] | None) -> bool:
    """Return whether a backend limited to some workers (by address, name or host) may use this one."""
    return allowed is None or bool({worker.address, worker.name, worker.host} & set(allowed))


def ranks(
    state: ResourceUsage, workers: Iterable[WorkerInfo], demand: Demand, avoid: Iterable[WorkerAddress] = ()
) -> Callable[[WorkerAddress], WorkerRank]:
    """Return a function that ranks workers; `place` takes the smallest rank, which ends with the address."""
    known = {each.address: each for each in workers}
    same = state.workers_of(demand.backend)
    rank = _ranks(state, same, _count_on_hosts(known.values(), same), demand, set(avoid))
    return lambda worker: rank(known[worker])


def _ranks(
    state: ResourceUsage,
    same: Mapping[WorkerAddress, int],
    on_hosts: Mapping[str, int],
    demand: Demand,
    avoided: Collection[WorkerAddress],
) -> Callable[[WorkerInfo], WorkerRank]:
    """Return the function that ranks a worker, given the bundles of the backend by worker and by host."""
    total_on = state.bundles_on()

    def rank(info: WorkerInfo) -> WorkerRank:
        worker = info.address
        mine, near = same.get(worker, 0), on_hosts.get(info.host, 0)
        crowd, is_avoided = total_on.get(worker, 0), worker in avoided
        if demand.is_packed:
            return (-mine, -near, is_avoided, -crowd, worker)
        return (mine, near, *crowding(info.threads, crowd, is_avoided=is_avoided), worker)

    return rank


def crowding(threads: int, bundles: int, *, is_avoided: bool) -> tuple[int, int]:
    """Return the part of the rank of a worker that does not depend on the backend.

    Parameters
    ----------
    bundles : int
        The number of bundles on it, of all backends.
    is_avoided : bool
        Whether it has the controller or a proxy.
    """
    # If only busy workers are left, all of them share the load.
    tier = FULL if bundles >= threads else AVOIDED if is_avoided else FREE
    return tier, bundles + SYSTEM_ACTOR_WEIGHT * is_avoided


def place(
    state: ResourceUsage, workers: Iterable[WorkerInfo], demand: Demand, avoid: Iterable[WorkerAddress] = ()
) -> tuple[WorkerAddress, ...] | None:
    """Return the best worker for each bundle, or None if they have no room together.

    Parameters
    ----------
    avoid
        The workers of the controller and the proxies.
    """
    known = list(workers)
    if len(demand.bundles) > 1:
        of_address = ranks(state, known, demand, avoid)
        return fit(_room_of(state, known, demand), demand.bundles, demand.strategy, of_address)
    same = state.workers_of(demand.backend)
    on_hosts = _count_on_hosts(known, same)
    avoided = set(avoid)
    rank = _ranks(state, same, on_hosts, demand, avoided)
    best: WorkerRank | None = None
    for is_avoided in (False, True):
        group = [each for each in known if (each.address in avoided) is is_avoided]
        most_threads = max(map(attrgetter("threads"), group), default=0)
        for crowd, worker in _likely_first(state, group):
            ranked = rank(worker)
            # Check the rank first, because it is cheaper than the room and rarely better.
            if (best is None or ranked < best) and _has_room(state, worker, demand, on_hosts):
                best = ranked
            least = crowding(most_threads, crowd, is_avoided=is_avoided)
            if best is not None and not demand.is_packed and best <= (0, 0, *least, worker.address):
                break  # no other worker of the group is better
    return None if best is None else (best[-1],)


def _likely_first(state: ResourceUsage, workers: Sequence[WorkerInfo]) -> Iterator[tuple[int, WorkerInfo]]:
    """Yield the number of bundles on each worker and the worker, ordered by this number and the address.

    If replicas spread, `place` then compares only few workers: the first ones are the best, unless they lack
    room or have replicas of the same backend.
    """
    if not workers:
        return
    crowd_of = state.bundles_on().get
    # Callers usually take only the first worker. This loop finds it in a third of the time of `min`.
    first = workers[0]
    least = crowd_of(first.address, 0)
    for each in workers:
        crowd = crowd_of(each.address, 0)
        if crowd < least or (crowd == least and each.address < first.address):
            least, first = crowd, each
    yield least, first
    rest = [
        (crowd_of(each.address, 0), each.address, n) for n, each in enumerate(workers) if each is not first
    ]
    heapq.heapify(rest)
    while rest:
        crowd, _, place = heapq.heappop(rest)
        yield crowd, workers[place]


def room_for(
    state: ResourceUsage,
    workers: Iterable[WorkerInfo],
    demand: Demand,
    most: int,
    only: WorkerAddress | None = None,
) -> int:
    """Return how many times a demand fits on these workers at once, at most ``most``.

    Parameters
    ----------
    only : str, optional
        Count only the room on this worker. The other workers matter only for the limit per host.
    """
    free_resources = _room_of(state, list(workers), demand)
    if only is not None:
        kept = free_resources.by_worker.get(only)
        free_resources.by_worker = {} if kept is None else {only: kept}
    first, strategy = demand.bundles[0], demand.strategy
    are_free = len(demand.bundles) == 1 or strategy in ("PACK", "SPREAD")
    if are_free and all(each == first for each in demand.bundles):
        # Equal bundles fit regardless of their order and place.
        return _count_equal(free_resources, first, most * len(demand.bundles)) // len(demand.bundles)
    found = 0
    while (
        found < most and fit(free_resources, demand.bundles, strategy, lambda worker: (worker,)) is not None
    ):
        found += 1
    return found


def _count_equal(free_resources: FreeResources, amounts: Amounts, most: int) -> int:
    """Place at most ``most`` equal bundles; return how many had room."""
    found = 0
    for worker, free in free_resources.by_worker.items():
        wanted = most - found
        if free_resources.per_host is not None:
            wanted = min(wanted, free_resources.per_host[free_resources.hosts[worker]])
        here = fill(free, amounts, wanted)
        if free_resources.per_host is not None:
            free_resources.per_host[free_resources.hosts[worker]] -= here
        found += here
    return found


def _has_room(state: ResourceUsage, worker: WorkerInfo, demand: Demand, on_hosts: Mapping[str, int]) -> bool:
    """Return whether a worker may be used and has room for the only bundle of a demand."""
    free = _room_of(state, [worker], demand, on_hosts)
    return worker.address in free.by_worker and free.has(worker.address, demand.bundles[0])


def _room_of(
    state: ResourceUsage,
    workers: Sequence[WorkerInfo],
    demand: Demand,
    on_hosts: Mapping[str, int] | None = None,
) -> FreeResources:
    """Return the free resources of the usable workers.

    ``on_hosts`` are the numbers of the backend's bundles by host; by default, those on these workers.
    """
    names = {name for each in demand.bundles for name in each}
    free = {}
    for worker in workers:
        if worker.is_available and not worker.is_system and is_allowed(worker, demand.allowed_workers):
            free[worker.address] = _free(state, worker, names)
    hosts = {worker.address: worker.host for worker in workers}
    if demand.most_per_host is None:
        return FreeResources(free, hosts)
    if on_hosts is None:
        on_hosts = _count_on_hosts(workers, state.workers_of(demand.backend))
    left = {host: demand.most_per_host - on_hosts.get(host, 0) for host in hosts.values()}
    return FreeResources(free, hosts, Counter(left))


def _free(state: ResourceUsage, worker: WorkerInfo, names: Iterable[str]) -> dict[str, float]:
    """Return the amounts that neither replicas nor Dask's tasks occupy on a worker."""
    offered, used = capacity(worker), state.used(worker.address)
    free = {name: offered.get(name, 0) - used.get(name, 0) for name in names}
    if worker.taken_by_tasks:
        # Tasks may be in bundles, which count as used already.
        own = state.used_by_replicas(worker.address)
        for name in worker.taken_by_tasks.keys() & free.keys():
            left = offered.get(name, 0) - own.get(name, 0) - worker.taken_by_tasks[name]
            free[name] = min(free[name], left)
    return free


def _count_on_hosts(workers: Iterable[WorkerInfo], bundles: Mapping[WorkerAddress, int]) -> dict[str, int]:
    """Return the number of bundles by host, without empty hosts, given the number by worker."""
    counts: dict[str, int] = {}
    if not bundles:
        return counts
    for worker in workers:
        if worker.address in bundles:
            counts[worker.host] = counts.get(worker.host, 0) + bundles[worker.address]
    return counts


def demand_of(backend: BackendRecord) -> Demand:
    """Return the demand of a new replica, or of a new gang."""
    allowed = backend.actor_options.workers
    return Demand(
        backend.tag,
        backend.gang_size * (backend.bundles or (backend.actor_options.demand(),)),
        None if allowed is None else tuple(allowed),
        backend.config.max_replicas_per_node,
        backend.config.packs,
        backend.config.strategy,
        backend.gang_size,
    )


def explain(state: ResourceUsage, workers: Iterable[WorkerInfo], demand: Demand) -> str:
    """Return the reason why no worker has room, with the numbers."""
    everyone = list(workers)
    known = [worker for worker in everyone if not worker.is_system]
    if not known and everyone:
        kept = f"{len(everyone)} worker{'s' if len(everyone) > 1 else ''}"
        return (
            f"system_workers keeps all {kept} for the controller and the proxies; start others for replicas"
        )
    if not known:
        return "the cluster has no workers that can hold replicas"
    allowed = [worker for worker in known if is_allowed(worker, demand.allowed_workers)]
    if not allowed:
        names = ", ".join(sorted(demand.allowed_workers or ()))
        return f"actor_options['workers'] allows only {names}, and none of these is in the cluster"
    free_resources = _room_of(state, known, demand)
    if not free_resources.by_worker:
        return f"all {len(allowed)} allowed workers are paused or closing"
    if len(demand.bundles) == 1:
        return _missing(free_resources, list(free_resources.by_worker), demand, demand.bundles[0])
    placed = _most_that_fit(state, known, demand)
    if demand.strategy == "STRICT_PACK":
        reason = _missing_on_one_host(free_resources, demand)
    else:
        reason = _missing_beside(free_resources, placed, demand)
    where = {"STRICT_PACK": " on one host", "STRICT_SPREAD": " on different hosts"}.get(demand.strategy, "")
    if demand.has_groups:
        whose = "a gang" if demand.replicas > 1 else "a placement group"
        what = f"the {len(demand.bundles)} bundles of {whose} are reserved together{where}"
    else:
        what = f"the {demand.replicas} replicas of a gang start together"
    return f"{what}, and only {counted(len(placed), 'has', 'have')} room: {reason}"


def _most_that_fit(
    state: ResourceUsage, workers: Sequence[WorkerInfo], demand: Demand
) -> tuple[WorkerAddress, ...]:
    """Return the workers of as many of the first bundles as fit together."""
    least, most = 0, len(demand.bundles) - 1
    found: tuple[WorkerAddress, ...] = ()
    while least < most:
        count = (least + most + 1) // 2
        free_resources = _room_of(state, workers, demand)
        placed = fit(free_resources, demand.bundles[:count], demand.strategy, lambda worker: (worker,))
        if placed is None:
            most = count - 1
        else:
            least, found = count, placed
    return found


def _missing_beside(free_resources: FreeResources, placed: Sequence[WorkerAddress], demand: Demand) -> str:
    """Return why the next bundle does not fit next to those that were placed."""
    for worker, amounts in zip(placed, demand.bundles, strict=False):
        free_resources.take(worker, amounts)
    workers = list(free_resources.by_worker)
    if demand.strategy == "STRICT_SPREAD":
        hosts = {free_resources.hosts[each] for each in placed}
        workers = [each for each in workers if free_resources.hosts[each] not in hosts]
        if not workers:
            return f"there are only {len(hosts)} usable hosts"
    return _missing(free_resources, workers, demand, demand.bundles[len(placed)])


def _missing_on_one_host(free_resources: FreeResources, demand: Demand) -> str:
    """Return why no host has room for all bundles."""
    hosts = by_host(free_resources, free_resources.by_worker).values()
    by_hosts = [total(free_resources.by_worker[each] for each in here) for here in hosts]
    lacks = _lacks(total(demand.bundles), by_hosts, "host")
    return f"together they need {lacks}" if lacks else "no host has workers on which all of them fit"


def _missing(
    free_resources: FreeResources, workers: Sequence[WorkerAddress], demand: Demand, amounts: Amounts
) -> str:
    """Return why one bundle has no room on some workers."""
    if free_resources.per_host is not None:
        hosts = len({free_resources.hosts[each] for each in workers})
        workers = [each for each in workers if free_resources.per_host[free_resources.hosts[each]] > 0]
        if not workers:
            limit = demand.most_per_host
            return f"max_replicas_per_node is {limit}, and each of the {hosts} usable hosts has as many"
    lacks = _lacks(amounts, [free_resources.by_worker[each] for each in workers], "worker")
    if lacks:
        who = "a bundle" if demand.has_groups else "a replica"
        return f"{who} needs {lacks}; {counted(len(workers), 'worker was', 'workers were')} considered"
    wanted = ", ".join(f"{name} {_amount(name, amount)}" for name, amount in sorted(amounts.items()))
    return f"no single one of {counted(len(workers), 'worker')} has all of {wanted or 'nothing'} free"


def _lacks(amounts: Amounts, free: Sequence[Amounts], place: str) -> str:
    """Return the resources of which no single place has enough, with the largest free amounts."""
    lacks = []
    for name, amount in sorted(amounts.items()):
        most = max(each[name] for each in free)
        if amount > most + TOLERANCE:
            known = _amount(name, max(0.0, most))
            lacks.append(f"{name} {_amount(name, amount)} (most free on one {place}: {known})")
    return ", ".join(lacks)


def _amount(name: str, amount: float) -> str:
    return shown_size(amount) if name == "memory" else shown(amount)
