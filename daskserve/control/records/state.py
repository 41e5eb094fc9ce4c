"""All records of an instance, with indexes for fast queries.

Only `State.apply` changes it, after the change is in the store. This module makes no decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from daskserve.common.types import (
    BackendTag,
    EndpointTag,
    ReplicaState,
    ReplicaTag,
    WorkerAddress,
    described,
)
from daskserve.control.records.applications import Applications, drop
from daskserve.control.records.bundles import OccupiedResources, places_of
from daskserve.control.records.deaths import DeathsRecord
from daskserve.control.records.declared import ConfigRecord, DeclarationRecord, Declared
from daskserve.control.records.events import EventLog, EventsRecord
from daskserve.control.records.models import ModelsRecord
from daskserve.control.records.proxy import Proxies, ProxyRecord
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    CapacityRecord,
    Change,
    CodeRecord,
    EndpointRecord,
    GoalRecord,
    Record,
    ReplicaRecord,
)
from daskserve.control.records.revisions import RevisionRecord, Revisions


class Codes(dict[str, CodeRecord]):
    """The stored user code (`CodeRecord`) by name, indexed by backend.

    Attributes
    ----------
    unused_bytes : int
        The size of all code, parcels included, that no backend uses at present.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused_bytes = 0
        self._of: dict[BackendTag, dict[str, None]] = {}
        #: How many backends use a code, which may be missing.
        self._users: Counter[str] = Counter()

    def keep(self, code: CodeRecord) -> None:
        """Add a record."""
        self[code.name] = code
        self._of.setdefault(code.backend, {})[code.name] = None
        self.unused_bytes += self._unused(code.name)

    def use(self, name: str) -> None:
        """Record that a backend uses a code from now on."""
        self.unused_bytes -= self._unused(name)
        self._users[name] += 1

    def release(self, name: str) -> None:
        """Record that a backend no longer uses a code."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
        self.unused_bytes += self._unused(name)

    def _unused(self, name: str) -> int:
        code = self.get(name)
        return 0 if code is None or name in self._users else code.size_bytes

    def forget(self, name: str) -> None:
        """Remove a record, if it is there."""
        self.unused_bytes -= self._unused(name)
        code = self.pop(name, None)
        if code is not None:
            names = self._of[code.backend]
            del names[name]
            if not names:
                del self._of[code.backend]

    def of(self, backend: BackendTag) -> list[CodeRecord]:
        """Return the records of a backend: the current one, and during a change an older one too."""
        return [self[name] for name in self._of.get(backend, ())]


class State:
    """The target state, and the recorded part of the actual state."""

    def __init__(self) -> None:
        self.backends: dict[BackendTag, BackendRecord] = {}
        self.codes = Codes()
        self.endpoints: dict[EndpointTag, EndpointRecord] = {}
        self.replicas: dict[ReplicaTag, ReplicaRecord] = {}
        self.proxies = Proxies()
        self.goals: dict[str, GoalRecord] = {}
        self.models: dict[BackendTag, ModelsRecord] = {}
        self.capacity = CapacityRecord()
        self.apps = Applications()
        self.declared = Declared()
        self.revisions = Revisions()
        self.events = EventLog()
        self._replicas_of: dict[BackendTag, dict[ReplicaTag, None]] = {}
        self._replicas_on: dict[WorkerAddress, dict[ReplicaTag, None]] = {}
        #: The number of bundles on each worker, of all backends and of each one. A replica may have several.
        self._bundles_on: dict[WorkerAddress, int] = {}
        self._workers_of: dict[BackendTag, dict[WorkerAddress, int]] = {}
        self.occupied = OccupiedResources()
        #: The backends that have an autoscaler.
        self.autoscaled: set[BackendTag] = set()
        self._endpoints_of: dict[BackendTag, dict[EndpointTag, None]] = {}
        self._endpoint_by_route: dict[str, EndpointTag] = {}

    def __repr__(self) -> str:
        return (
            f"<State backends={len(self.backends)} endpoints={len(self.endpoints)} "
            f"applications={len(self.apps)} replicas={len(self.replicas)} proxies={len(self.proxies)} "
            f"goals={len(self.goals)}>"
        )

    def records(self) -> dict[str, Record]:
        """Return all records by their keys in the store."""
        kinds = (
            self.backends,
            self.codes,
            self.endpoints,
            self.replicas,
            self.proxies,
            self.goals,
            self.models,
            self.events.deaths,
        )
        found: dict[str, Record] = {record.key: record for kind in kinds for record in kind.values()}
        listed = (self.apps, self.declared, self.revisions, self.events)
        found.update({each.key: each for kind in listed for each in kind})
        if self.capacity != CapacityRecord():
            found[self.capacity.key] = self.capacity
        return found

    def replicas_of(self, backend: BackendTag) -> list[ReplicaRecord]:
        """Return a backend's replicas, oldest first."""
        return [self.replicas[tag] for tag in self._replicas_of.get(backend, ())]

    def replicas_on(self, worker: WorkerAddress) -> list[ReplicaRecord]:
        """Return the replicas placed on a worker."""
        return [self.replicas[tag] for tag in self._replicas_on.get(worker, ())]

    def is_at_zero(self, backend: BackendTag) -> bool:
        """Return whether the autoscaler has scaled a backend to zero."""
        known = self.backends.get(backend)
        return known is not None and known.scaled_to == 0

    def has_running(self, backend: BackendTag) -> bool:
        """Return whether any replica of a backend runs, without iterating over all of them."""
        tags = self._replicas_of.get(backend, ())
        return any(self.replicas[tag].state is ReplicaState.RUNNING for tag in tags)

    def running(self, backend: BackendTag) -> list[ReplicaRecord]:
        """Return a backend's running replicas, oldest first."""
        return [each for each in self.replicas_of(backend) if each.state is ReplicaState.RUNNING]

    def count_on(self, worker: WorkerAddress, backend: BackendTag | None = None) -> int:
        """Return the number of bundles on a worker, of one backend or of all; most replicas have one."""
        if backend is None:
            return self._bundles_on.get(worker, 0)
        return self._workers_of.get(backend, {}).get(worker, 0)

    def bundles_on(self) -> Mapping[WorkerAddress, int]:
        """Return the workers that hold bundles, each with their number."""
        return self._bundles_on

    def workers_of(self, backend: BackendTag) -> Mapping[WorkerAddress, int]:
        """Return the workers that hold bundles of a backend, each with their number."""
        return self._workers_of.get(backend, {})

    def workers_in_use(self) -> set[WorkerAddress]:
        """Return the workers that hold a replica, a bundle of a placement group, or a proxy."""
        return self._bundles_on.keys() | self.proxies.workers

    def used(self, worker: WorkerAddress) -> Mapping[str, float]:
        """Return the amounts that the replicas on a worker occupy, by resource."""
        return self.occupied.used.get(worker, {})

    def used_by_replicas(self, worker: WorkerAddress) -> Mapping[str, float]:
        """Return the part of `used` that Dask's tasks cannot use."""
        return self.occupied.by_replicas.get(worker, {})

    def endpoints_of(self, backend: BackendTag) -> list[EndpointTag]:
        """Return the endpoints whose traffic or shadows name a backend."""
        return list(self._endpoints_of.get(backend, ()))

    def endpoint_at(self, route: str) -> EndpointRecord | None:
        """Return the endpoint registered at exactly this route."""
        name = self._endpoint_by_route.get(route)
        return None if name is None else self.endpoints[name]

    def routes(self) -> dict[str, EndpointRecord]:
        """Return the endpoints that have a route, by route."""
        return {route: self.endpoints[name] for route, name in self._endpoint_by_route.items()}

    def apply(self, change: Change) -> None:
        """Apply a change that is in the store."""
        plain: Mapping[str, dict[str, Any]] = {
            GoalRecord.KIND: self.goals,
            ModelsRecord.KIND: self.models,
            DeathsRecord.KIND: self.events.deaths,
            ConfigRecord.KIND: self.declared.configs,
        }
        tables: Mapping[str, Any] = {
            CodeRecord.KIND: self.codes,
            AppRecord.KIND: self.apps,
            ProxyRecord.KIND: self.proxies,
            RevisionRecord.KIND: self.revisions,
            EventsRecord.KIND: self.events,
        }
        for key, record in change.items():
            kind, _, name = key.partition("/")
            if kind == ReplicaRecord.KIND:
                self._replace_replica(name, record)
            elif kind in plain:
                plain[kind].pop(name, None)
                if record is not None:
                    plain[kind][name] = record
            elif kind in tables:
                tables[kind].forget(name)
                if record is not None:
                    tables[kind].keep(record)
            else:
                self._forget(kind, name)
                self._keep(record)

    def _keep(self, record: Record | None) -> None:
        if isinstance(record, BackendRecord):
            self.backends[record.tag] = record
            self.codes.use(record.code_key)
            self.apps.add(record)
            if record.autoscaling is not None:
                self.autoscaled.add(record.tag)
        elif isinstance(record, EndpointRecord):
            self.endpoints[record.name] = record
            if record.route is not None:
                self._endpoint_by_route[record.route] = record.name
            for backend in (*record.traffic, *record.shadows):
                self._endpoints_of.setdefault(backend, {})[record.name] = None
        elif isinstance(record, DeclarationRecord):
            self.declared.last = record
        elif isinstance(record, CapacityRecord):
            self.capacity = record

    def _forget(self, kind: str, name: str) -> None:
        if kind == BackendRecord.KIND:
            backend = self.backends.pop(name, None)
            if backend is not None:
                self.apps.remove(backend)
                self.codes.release(backend.code_key)
            self.autoscaled.discard(name)
        elif kind == EndpointRecord.KIND:
            endpoint = self.endpoints.pop(name, None)
            if endpoint is not None:
                self._unindex_endpoint(endpoint)
        elif kind == DeclarationRecord.KIND:
            self.declared.last = DeclarationRecord()
        elif kind == CapacityRecord.KIND:
            self.capacity = CapacityRecord()

    def _unindex_endpoint(self, endpoint: EndpointRecord) -> None:
        # Another endpoint may have taken the route earlier in the same change.
        if endpoint.route is not None and self._endpoint_by_route.get(endpoint.route) == endpoint.name:
            del self._endpoint_by_route[endpoint.route]
        for backend in (*endpoint.traffic, *endpoint.shadows):
            drop(self._endpoints_of, backend, endpoint.name)

    def _replace_replica(self, tag: ReplicaTag, record: Record | None) -> None:
        # Update in place, so that `replicas_of` stays in the order of creation.
        old = self.replicas.pop(tag, None)
        new = record if isinstance(record, ReplicaRecord) else None
        if old is not None and old.worker is not None:
            drop(self._replicas_on, old.worker, tag)
            self._reserve(old, -1)
        if new is not None:
            self.replicas[tag] = new
            self._replicas_of.setdefault(new.backend, {})[tag] = None
            if new.worker is not None:
                self._replicas_on.setdefault(new.worker, {})[tag] = None
                self._reserve(new, 1)
        elif old is not None:
            drop(self._replicas_of, old.backend, tag)

    def _count(self, worker: WorkerAddress, backend: BackendTag, by: int) -> None:
        _add(self._bundles_on, worker, by)
        counts = self._workers_of.setdefault(backend, {})
        _add(counts, worker, by)
        if not counts:
            del self._workers_of[backend]

    def _reserve(self, replica: ReplicaRecord, sign: int) -> None:
        self.occupied.add(replica, sign)
        for worker, _ in places_of(replica):
            self._count(worker, replica.backend, sign)
            if worker not in self._bundles_on:
                self.occupied.drop(worker)


def _add(counts: dict[str, int], name: str, by: int) -> None:
    """Add to a count; remove the count if it becomes 0."""
    counts[name] = counts.get(name, 0) + by
    if not counts[name]:
        del counts[name]


def display_name(state: State, tag: BackendTag) -> str:
    """Return the name of a backend in messages, even of a removed one."""
    backend = state.backends.get(tag)
    return described(tag) if backend is None else backend.display_name
