"""Decides which HTTP proxies run on which workers. Pure.

HeadOnly: one proxy, on the scheduler's host if it has a worker, otherwise anywhere. EveryNode: one per host.
EveryWorker: one per worker. A proxy stays on its worker as long as the worker lives; its replacement on the
same host keeps the port.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from daskserve.control.observed import Observed
from daskserve.control.records import Change, ProxyRecord
from daskserve.control.state import State
from daskserve.types import Location, WorkerAddress, WorkerInfo


@dataclass(frozen=True, slots=True)
class StartProxy:
    """Create the proxy's actor, or find it."""

    proxy: ProxyRecord


@dataclass(frozen=True, slots=True)
class StopProxy:
    """Stop the proxy's actor."""

    proxy: ProxyRecord


@dataclass(slots=True)
class HttpStep:
    """The change to write, and the actions that follow.

    Attributes
    ----------
    lost : list
        The proxies whose workers are gone; observations of them are outdated.
    incarnation : int
        The last incarnation number in use, including those of this step.
    """

    change: Change = field(default_factory=dict)
    actions: list[StartProxy | StopProxy] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    incarnation: int = 0


def wanted_slots(
    location: Location | None, workers: Sequence[WorkerInfo], state: State, avoid: WorkerAddress | None
) -> dict[str, list[WorkerInfo]]:
    """Return the target proxies by name, each with the workers on which it may run, best first."""
    if location in (None, Location.NO_SERVER):
        return {}

    def rank(worker: WorkerInfo) -> tuple[bool, bool, int, str]:
        busy = state.count_on(worker.address)
        return (not worker.is_available, worker.address == avoid, busy, worker.address)

    if location is Location.EVERY_WORKER:
        return {worker.address: [worker] for worker in workers}
    by_host: dict[str, list[WorkerInfo]] = {}
    for worker in sorted(workers, key=rank):
        by_host.setdefault(worker.host, []).append(worker)
    if location is Location.EVERY_NODE:
        return by_host
    ordered = sorted(workers, key=lambda worker: (not worker.is_head, *rank(worker)))
    return {"head": ordered} if ordered else {}


def step(
    state: State,
    observed: Observed,
    *,
    location: Location | None,
    port: int,
    incarnation: int,
    avoid: WorkerAddress | None,
) -> HttpStep:
    """Return the next change and actions for the proxies.

    Parameters
    ----------
    port : int
        The port in the options; 0 means any free port.
    incarnation : int
        The last incarnation number in use.
    """
    result = HttpStep(incarnation=incarnation)
    usable = observed.cleared_workers()
    slots = wanted_slots(location, usable, state, avoid)
    # The replacement of a proxy keeps a port that was chosen automatically.
    ports = {proxy.host: port or proxy.port for proxy in state.proxies.values() if port or proxy.port}
    kept = _keep(state, observed, slots, {each.address for each in usable}, result)
    wanted = {
        name: _settle(kept.get(name), workers[0], name, port, ports, result)
        for name, workers in slots.items()
    }
    ready_hosts = {proxy.host for proxy in kept.values() if _is_ready(observed, proxy)}
    starting_hosts: set[str] = set()
    for proxy in wanted.values():
        # One at a time per host until the first listens: it must find the port free, the others share it.
        must_wait = proxy.host in starting_hosts and proxy.host not in ready_hosts
        if not _is_ready(observed, proxy) and not must_wait:
            starting_hosts.add(proxy.host)
            result.actions.append(StartProxy(proxy))
    return result


def _keep(
    state: State,
    observed: Observed,
    slots: Collection[str],
    usable: Collection[WorkerAddress],
    result: HttpStep,
) -> dict[str, ProxyRecord]:
    """Return the proxies that stay on their workers; remove the others."""
    kept: dict[str, ProxyRecord] = {}
    for proxy in state.proxies.values():
        if proxy.worker in observed.lost_workers or proxy.worker not in observed.workers:
            result.lost.append(proxy.name)
            # While there are no workers, as during a restart of the cluster, the record keeps the port.
            if observed.usable_workers():
                result.change[proxy.key] = None
        elif proxy.name not in slots or proxy.worker not in usable:
            result.change[proxy.key] = None
            result.actions.append(StopProxy(proxy))
        else:
            kept[proxy.name] = proxy
    return kept


def _settle(
    kept: ProxyRecord | None,
    best: WorkerInfo,
    name: str,
    port: int,
    ports: Mapping[str, int],
    result: HttpStep,
) -> ProxyRecord:
    """Return a target proxy's record with the port of its host; a new record if none is kept."""
    proxy = kept
    if proxy is None:
        result.incarnation += 1
        proxy = ProxyRecord(name, best.address, best.host, result.incarnation, port)
    wanted_port = proxy.port or ports.get(proxy.host, 0)
    if kept is None or proxy.port != wanted_port:
        proxy = replace(proxy, port=ports.get(proxy.host, wanted_port))
        result.change[proxy.key] = proxy
    return proxy


def _is_ready(observed: Observed, proxy: ProxyRecord) -> bool:
    facts = observed.proxies_ready.get(proxy.name)
    return facts is not None and facts["incarnation"] == proxy.incarnation
