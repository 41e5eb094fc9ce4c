"""The actors of an instance as plain values: proxies, replicas and the controller. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from daskserve.common.types import ActorKind, Reachability, ReplicaTag, WorkerAddress
from daskserve.control.backend import progress
from daskserve.control.observed.observed import Activity, Observed
from daskserve.control.proxies.step import is_ready
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.state import State
from daskserve.payload.error_text import text_of


def proxy_state(proxy: ProxyRecord, observed: Observed) -> str:
    """Return the status word of a proxy."""
    if proxy.is_leaving:
        return "DRAINING"
    if proxy.worker in observed.unresponsive:
        return "UNHEALTHY"
    return "RUNNING" if is_ready(observed, proxy) else "STARTING"


def proxy_message(proxy: ProxyRecord, observed: Observed) -> str:
    """Return why a proxy does not listen, or listens elsewhere than expected; otherwise empty."""
    if proxy.is_leaving:
        return "finishes its requests once another proxy listens in its place"
    found = []
    if proxy.worker is None:
        found.append(f"waits for a worker on host {proxy.host}")
    elif proxy.worker in observed.unresponsive:
        found.append(f"worker {proxy.worker} does not answer")
    elif proxy.name in observed.proxies_failed:
        found.append(text_of(observed.proxies_failed[proxy.name]))
    if stray := observed.stray(proxy.worker or ""):
        found.append(stray)
    if proxy.home:
        found.append(f"moved here from host {proxy.home}, and moves back once that has a worker for it")
    return "; ".join(found)


def http_urls(state: State, observed: Observed) -> list[str]:
    """Return the URLs at which proxies listen, each once."""
    # A proxy that is leaving may still accept requests.
    placed = {(each.name, each.incarnation) for each in state.proxies.values() if each.worker is not None}
    ready = sorted(observed.proxies_ready.items())
    urls = (facts["urls"] for name, facts in ready if (name, facts["incarnation"]) in placed)
    return list(dict.fromkeys(itertools.chain.from_iterable(urls)))


def actors(state: State, observed: Observed, instance: str, controller: Mapping[str, Any]) -> list[Any]:
    """Return every actor of the instance: kind, name, state, worker, host, pid."""
    found = system_actors(state, observed, instance, controller)
    for replica in state.replicas.values():
        ready = observed.ready.get(replica.tag)
        found.append(
            {
                "kind": ActorKind.REPLICA.value,
                "name": replica.tag,
                "state": replica.state.value,
                **_where(observed, replica.worker),
                "pid": ready.get("pid") if ready is not None else None,
                "message": replica_message(observed, replica.tag),
                "rank": replica.rank[0] if replica.rank else None,
                "metadata": dict(replica.metadata),
                "routing_stats": dict(observed.routing_stats.get(replica.tag)),
                "multiplexed": observed.multiplexed.of(replica.tag),
            }
        )
    return found


def system_actors(
    state: State, observed: Observed, instance: str, controller: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the controller and the proxies, like `actors`."""
    found: list[dict[str, Any]] = [
        {
            "kind": ActorKind.CONTROLLER.value,
            "name": f"{instance}/controller",
            "state": "RUNNING",
            **_where(observed, controller["worker"]),
            "pid": controller["pid"],
            "message": observed.stray(controller["worker"]),
        }
    ]
    for proxy in state.proxies.values():
        facts = observed.proxies_ready.get(proxy.name, {})
        is_its = proxy.worker is not None and facts.get("incarnation") == proxy.incarnation
        found.append(
            {
                "kind": ActorKind.PROXY.value,
                "name": proxy.tag,
                "state": proxy_state(proxy, observed),
                **_where(observed, proxy.worker),
                "pid": facts.get("pid") if is_its else None,
                "message": proxy_message(proxy, observed),
            }
        )
    return found


def _where(observed: Observed, worker: WorkerAddress | None) -> dict[str, Any]:
    info = observed.workers.get(worker or "")
    return {"worker": worker, "host": info.host if info else None}


def replica_message(observed: Observed, tag: ReplicaTag) -> str:
    """Return why a replica is unhealthy, or its activity while it starts or stops; otherwise empty."""
    return observed.unhealthy.get(tag) or _work(observed.busy.get(tag))


def _work(busy: Activity | None) -> str:
    """Return the activity of a replica that starts or stops, with its duration if that is long."""
    return "" if busy is None else progress.work_text(busy) or busy.what


def broken_routes(
    observed: Observed, here: WorkerAddress, from_here: Mapping[WorkerAddress, Reachability]
) -> dict[WorkerAddress, dict[WorkerAddress, str]]:
    """Return the workers that other workers do not reach directly, each with the route in use.

    ``from_here`` are the workers that the controller's worker does not reach directly. Unresponsive workers
    are left out.
    """
    found = {**observed.broken_routes, here: {each: route.value for each, route in from_here.items()}}
    there = observed.workers.keys() - observed.unresponsive
    kept = {
        worker: {other: route for other, route in routes.items() if other in there}
        for worker, routes in found.items()
        if worker in there
    }
    return {worker: routes for worker, routes in kept.items() if routes}
