"""Which HTTP proxy runs on which worker. Pure.

HeadOnly: one, on the scheduler's host if a worker lives there, else anywhere. EveryNode: one per host.
EveryWorker: one per worker. A proxy stays where it is as long as its worker does; its replacement on the
same host keeps the port.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from daskserve.control.observed import Observed
from daskserve.control.records import Change, ProxyRecord
from daskserve.control.state import State
from daskserve.types import Location, WorkerAddress, WorkerInfo


@dataclass(frozen=True, slots=True)
class StartProxy:
    """Make the proxy's actor, or find it."""

    proxy: ProxyRecord


@dataclass(frozen=True, slots=True)
class StopProxy:
    """End the proxy's actor."""

    proxy: ProxyRecord


@dataclass(slots=True)
class HttpStep:
    """What to write, then what to do."""

    change: Change = field(default_factory=dict)
    actions: list[StartProxy | StopProxy] = field(default_factory=list)


def wanted_slots(
    location: Location | None, workers: Sequence[WorkerInfo], state: State, avoid: WorkerAddress | None
) -> dict[str, list[WorkerInfo]]:
    """Return the proxies wanted, by name, each with the workers it may run on, best first."""
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
    next_incarnation: Callable[[], int],
    avoid: WorkerAddress | None,
) -> HttpStep:
    """Return what to write and what to do next about the proxies."""
    result = HttpStep()
    # A worker that joined again under its old address is of use once what was lost with it is seen to.
    usable = [each for each in observed.usable_workers() if each.address not in observed.lost_workers]
    usable_addresses = {each.address for each in usable}
    slots = wanted_slots(location, usable, state, avoid)
    # A port that was found free is kept by whatever replaces its proxy; a port that was named is named.
    ports = {proxy.host: port or proxy.port for proxy in state.proxies.values() if port or proxy.port}
    kept: dict[str, ProxyRecord] = {}
    for proxy in state.proxies.values():
        if proxy.worker in observed.lost_workers or proxy.worker not in observed.workers:
            observed.proxies_ready.pop(proxy.name, None)
            observed.proxies_failed.pop(proxy.name, None)
            # While there is no worker at all, as in a restart of the cluster, the record keeps the port.
            if observed.usable_workers():
                result.change[proxy.key] = None
        elif proxy.name not in slots or proxy.worker not in usable_addresses:
            result.change[proxy.key] = None
            result.actions.append(StopProxy(proxy))
        else:
            kept[proxy.name] = proxy
    starting_hosts: set[str] = set()
    ready_hosts = {proxy.host for proxy in kept.values() if _is_ready(observed, proxy)}
    for name, workers in slots.items():
        known = kept.get(name)
        if known is None:
            best = workers[0]
            known = ProxyRecord(name, best.address, best.host, next_incarnation(), port)
        wanted_port = known.port or ports.get(known.host, 0)
        if name not in kept or known.port != wanted_port:
            known = replace(known, port=ports.get(known.host, wanted_port))
            result.change[known.key] = known
        if not _is_ready(observed, known):
            # One at a time per host until the first listens: it must find the port free, the others share it.
            if known.host in starting_hosts and known.host not in ready_hosts:
                continue
            starting_hosts.add(known.host)
            result.actions.append(StartProxy(known))
    return result


def _is_ready(observed: Observed, proxy: ProxyRecord) -> bool:
    facts = observed.proxies_ready.get(proxy.name)
    return facts is not None and facts["incarnation"] == proxy.incarnation
