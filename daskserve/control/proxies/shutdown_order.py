"""The end of an instance: the order in which actors drain, and the time limits. Pure.

At its end, an instance deletes everything in memory only, so the usual steps of the backends keep the order.
The store keeps the records, and an instance that starts on the store later runs everything again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, WorkerAddress
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord, Change
from daskserve.control.records.state import State


def leaving(state: State) -> Change:
    """Return the change that stops all backends, each after the backends that call it.

    Goals stay pending, because they are not reached. Their callers get the error that the instance has ended.
    """
    change: Change = {}
    for endpoint in state.endpoints.values():
        backend = state.backends.get(endpoint.name)
        if endpoint.is_legacy or backend is None or not state.apps.needed_by(backend.tag):
            change[endpoint.key] = None  # steps remove other endpoints once nothing calls them
    for app in state.apps:
        change[app.key] = replace(app, is_deleting=True, goal=None)
    for backend in state.backends.values():
        change[backend.key] = replace(backend, is_deleting=True, goal=None)
    return change


def grace_s(state: State) -> float:
    """Return the longest time for which a request may still run, in seconds."""
    return max((_grace_of(backend) for backend in state.backends.values()), default=0.0)


def limit_s(state: State) -> float:
    """Return the time in seconds within which all backends drain, each after the backends that call it."""
    total: dict[BackendTag, float] = {}
    for app in state.apps:
        for tag in app.tags:
            backend = state.backends.get(tag)
            if backend is not None:
                called = (total.get(each, 0.0) for each in backend.needs)
                total[tag] = _grace_of(backend) + max(called, default=0.0)
    return max([grace_s(state), *total.values()])


def _grace_of(backend: BackendRecord) -> float:
    return 0.0 if backend.is_forced else backend.config.experimental_graceful_shutdown_timeout_s


def workers_to_ask(state: State, observed: Observed) -> Set[WorkerAddress]:
    """Return the workers that may have requests in progress and can answer."""
    return (state.workers_in_use() & observed.workers.keys()) - observed.unresponsive


def requests_under_way(state: State, actors: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of requests in progress by application, or by backend if it belongs to none.

    Calls between the deployments of an application count only if its ingress has no requests. Requests that
    wait in a proxy for a replica are counted under the empty name, if there are no others.

    Parameters
    ----------
    actors
        The results of `Cluster.inspect` of the workers.
    """
    counts: Counter[BackendTag] = Counter()
    in_proxies = 0
    for actor in actors:
        _, is_replica, tag = actor["name"].partition("/replica/")
        replica = state.replicas.get(tag) if is_replica else None
        if replica is not None:
            counts[replica.backend] += actor.get("ongoing", 0)
        elif "/proxy/" in actor["name"]:
            in_proxies += actor.get("ongoing", 0)
    found: Counter[str] = Counter()
    for app in state.apps:
        found[app.name] = counts[app.ingress] or sum(counts[tag] for tag in state.apps.members(app.name))
    for tag, backend in state.backends.items():
        if not backend.application:
            found[tag] += counts[tag]
    if not found.total():
        found[""] = in_proxies
    return {name: count for name, count in found.items() if count}
