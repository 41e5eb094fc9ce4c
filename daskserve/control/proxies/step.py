"""Decides which HTTP proxies run on which workers. Pure.

HeadOnly: one proxy, on the scheduler's host if it has a worker, otherwise anywhere. EveryNode: one per host.
EveryWorker: one per worker. A proxy stays on its worker as long as the worker can hold it; its replacement on
the same host keeps the port.

1. A worker retires or does not answer. Its proxy is recorded as leaving. It accepts requests until a
   successor listens, and its record stays until its last request has ended.
2. A worker is lost. Clients of HeadOnly know one address, so the proxy waits for a worker on that host, which
   a nanny may be restarting. If none joins within a grace period, the proxy moves to another host. It moves
   back when its own host has had a worker for the same period.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from daskserve.common.copying import replace
from daskserve.common.types import Location, WorkerAddress, WorkerInfo
from daskserve.control.observed.observed import Observed
from daskserve.control.proxies import shutdown_order as departure
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import Change
from daskserve.control.records.state import State
from daskserve.options.http import HTTPOptions

#: Minimum grace period of a leaving proxy, in seconds, even if there are no replicas any more.
PROXY_GRACE_S = 5.0

#: The name of the proxy of HeadOnly.
HEAD = "head"


@dataclass(frozen=True, slots=True)
class StartProxy:
    """Create the proxy's actor, or find it."""

    proxy: ProxyRecord


@dataclass(frozen=True, slots=True)
class StopProxy:
    """Stop the proxy's actor, once its requests have ended or the grace period is over."""

    proxy: ProxyRecord
    grace_s: float


@dataclass(frozen=True, slots=True)
class ProxyRules:
    """The settings for proxies, which are fixed for the life of a controller.

    Attributes
    ----------
    port : int
        The port in the options; 0 means any free port.
    avoid : str or None
        The worker that gets a proxy last.
    return_grace_s : float
        How long the reason to move to another host must last.
    start_id : str
        The id of the instance's start. Proxies do not wait for hosts of an earlier start, because that was on
        another cluster.
    """

    location: Location | None
    port: int
    avoid: WorkerAddress | None
    return_grace_s: float
    start_id: str

    @classmethod
    def of(cls, options: HTTPOptions, *, avoid: WorkerAddress | None, start_id: str) -> Self:
        """Return the rules of an instance's options."""
        location = options.location if options.has_proxies else Location.NO_SERVER
        return cls(location, options.port, avoid, options.return_grace_s, start_id)


@dataclass(slots=True)
class HttpStep:
    """The change to write, and the actions that follow.

    Attributes
    ----------
    lost : list
        The proxies whose workers were lost; their observations are outdated.
    incarnation : int
        The last incarnation number in use, including those of this step.
    apart : dict
        Since when a proxy has had a reason to move to another host, by name.
    wake_at : float or None
        When such a reason has lasted for the grace period.
    messages : list
        Log messages about proxies that change their address.
    """

    change: Change = field(default_factory=dict)
    actions: list[StartProxy | StopProxy] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    incarnation: int = 0
    apart: dict[str, float] = field(default_factory=dict)
    wake_at: float | None = None
    messages: list[str] = field(default_factory=list)


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
    return {HEAD: ordered} if ordered else {}


def system_workers(workers: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
    """Return the workers that are kept for the controller and the proxies, or all if there are none."""
    return [each for each in workers if each.is_system] or workers


def step(state: State, observed: Observed, rules: ProxyRules, *, incarnation: int, now: float) -> HttpStep:
    """Return the next change and actions for the proxies.

    Parameters
    ----------
    incarnation : int
        The last incarnation number in use.
    """
    result = HttpStep(incarnation=incarnation)
    usable = system_workers(observed.cleared_workers())
    slots = wanted_slots(rules.location, usable, state, rules.avoid)
    found, leaving = _found(state, observed, result)
    placing = _ProxyPlacement(state, observed, rules, {each.address for each in usable}, now, result)
    for name in sorted(found.keys() - slots.keys()):
        placing.release(found.pop(name), slots)
    wanted = [placing.place(found.get(name), name, workers) for name, workers in slots.items()]
    _begin(observed, wanted, result)
    leaving += placing.leaving
    if rules.location not in (None, Location.NO_SERVER):
        leaving = [each for each in leaving if _may_end(each, state, observed, [*wanted, *placing.kept])]
    grace_s = max(PROXY_GRACE_S, departure.grace_s(state)) if leaving else 0.0
    result.actions += [StopProxy(proxy, grace_s) for proxy in leaving]
    return result


def is_ready(observed: Observed, proxy: ProxyRecord) -> bool:
    """Return whether a proxy listens, and its process answers."""
    facts = observed.proxies_ready.get(proxy.name)
    is_started = facts is not None and facts["incarnation"] == proxy.incarnation
    return is_started and _can_answer(observed, proxy)


def _can_answer(observed: Observed, proxy: ProxyRecord) -> bool:
    return proxy.worker is not None and proxy.worker not in observed.unresponsive


def _may_end(proxy: ProxyRecord, state: State, observed: Observed, wanted: Sequence[ProxyRecord]) -> bool:
    """Return whether a leaving proxy may stop, because another one listens, if possible on its host."""
    if not wanted:
        # A worker with replicas cannot leave before other workers join; its proxy serves until then.
        return proxy.worker is None or not state.count_on(proxy.worker)
    beside = [each for each in wanted if each.host == proxy.host]
    return any(is_ready(observed, each) for each in beside or wanted)


def held_workers(state: State, location: Location | None) -> set[WorkerAddress]:
    """Return the workers that an adaptive cluster must keep.

    With one proxy per worker or host, a proxy alone does not keep its worker in the cluster. The only proxy
    of an instance does keep its worker, because clients know its address.
    """
    held = set(state.bundles_on())
    if location is Location.HEAD_ONLY:
        proxies = state.proxies.values()
        held |= {each.worker for each in proxies if each.worker is not None and not each.is_leaving}
    return held


def _found(
    state: State, observed: Observed, result: HttpStep
) -> tuple[dict[str, ProxyRecord], list[ProxyRecord]]:
    """Return the proxies that are kept, by name, and those that leave; record lost ones, drop ended ones."""
    found: dict[str, ProxyRecord] = {}
    leaving: list[ProxyRecord] = []
    for proxy in state.proxies.values():
        at = proxy.worker
        is_lost = at is not None and (at in observed.lost_workers or at not in observed.workers)
        if is_lost:
            result.lost.append(proxy.tag)
        if not proxy.is_leaving:
            # The record is kept, with the host and the port.
            found[proxy.name] = replace(proxy, worker=None) if is_lost else proxy
        elif is_lost or proxy.tag in observed.proxies_gone:
            result.change[proxy.key] = None
        else:
            leaving.append(proxy)
    return found, leaving


def _begin(observed: Observed, wanted: Iterable[ProxyRecord], result: HttpStep) -> None:
    ready_hosts = {proxy.host for proxy in wanted if is_ready(observed, proxy)}
    starting_hosts: set[str] = set()
    # Oldest first, so that the proxies of an earlier controller are found before new ones start on their
    # hosts.
    for proxy in sorted(wanted, key=lambda each: each.incarnation):
        # Only one proxy per host starts until the first one listens, because the first one needs a free port.
        must_wait = proxy.host in starting_hosts and proxy.host not in ready_hosts
        if _can_answer(observed, proxy) and not is_ready(observed, proxy) and not must_wait:
            starting_hosts.add(proxy.host)
            result.actions.append(StartProxy(proxy))


class _ProxyPlacement:
    """Places the proxies of one step."""

    def __init__(
        self,
        state: State,
        observed: Observed,
        rules: ProxyRules,
        usable: Collection[WorkerAddress],
        now: float,
        result: HttpStep,
    ) -> None:
        self._state = state
        self._observed = observed
        self._rules = rules
        self._usable = usable
        self._now = now
        self._result = result
        #: The replacement of a proxy keeps a port that was chosen automatically.
        self._ports = {each.home: each.home_port for each in state.proxies.values() if each.home_port}
        self._ports |= {each.host: each.port for each in state.proxies.values() if each.port}
        #: The hosts whose port was chosen or reused since the instance started.
        self._own_hosts = {
            host
            for each in state.proxies.values()
            if self._may_wait(each) and not each.may_move
            for host in (each.host, each.home)
        }
        #: The proxies that begin to leave in this step.
        self.leaving: list[ProxyRecord] = []
        #: The proxies that stay although no slot needs them.
        self.kept: list[ProxyRecord] = []

    def release(self, proxy: ProxyRecord, slots: Mapping[str, Sequence[WorkerInfo]]) -> None:
        """Remove a proxy without a slot, unless its worker does not answer or its port should be kept."""
        has_location = self._rules.location not in (None, Location.NO_SERVER)
        silent = self._observed.unresponsive - self._observed.retiring()
        if has_location and proxy.worker in silent:
            self.kept.append(proxy)  # it cannot be stopped, and no other proxy replaces it
            return
        if proxy.worker is not None:
            self._leave(proxy)
        hosts = {each.host for workers in slots.values() for each in workers}
        # While there are no workers, as during a restart of the cluster, the record keeps the address.
        keeps_port = not self._rules.port and proxy.host not in hosts and self._may_wait(proxy)
        if has_location and (not self._usable or (keeps_port and not self._has_lasted(proxy.name))):
            self._keep(replace(proxy, worker=None))
        else:
            self._result.change[proxy.key] = None

    def place(self, current: ProxyRecord | None, name: str, candidates: Sequence[WorkerInfo]) -> ProxyRecord:
        """Return the record of a wanted proxy, on its current worker or on the best one for it."""
        at = candidates[0] if current is None else self._worker_for(current, candidates)
        if current is not None and (at is None or self._may_stay(current, at)):
            host_port = self._rules.port or self._ports.get(current.host, 0)
            proxy = replace(current, port=current.port or host_port)
        else:
            assert at is not None
            self._result.incarnation += 1
            port = self._rules.port or self._ports.get(at.host, 0)
            proxy = ProxyRecord(name, at.address, at.host, self._result.incarnation, port)
            may_move = not self._rules.port and at.host not in self._own_hosts
            proxy = replace(proxy, start_id=self._rules.start_id, may_move=may_move)
            if current is not None and name == HEAD:
                proxy = self._with_home(proxy, current)
            if current is not None and current.worker is not None:
                self._leave(current)
        self._keep(proxy)
        return proxy

    def _keep(self, proxy: ProxyRecord) -> None:
        if self._state.proxies.get(proxy.tag) != proxy:
            self._result.change[proxy.key] = proxy

    def _leave(self, proxy: ProxyRecord) -> None:
        gone = replace(proxy, is_leaving=True)
        self._result.change[gone.key] = gone
        self.leaving.append(gone)

    def _worker_for(self, current: ProxyRecord, candidates: Sequence[WorkerInfo]) -> WorkerInfo | None:
        """Return the worker on which a proxy runs from now on; None while it waits for its host."""
        home = current.home or current.host
        here = next((each for each in candidates if each.address == current.worker), None)
        at_home = [each for each in candidates if each.host == home]
        if here is not None and (here.host == home or not at_home):
            return here
        if at_home:
            # The proxy serves elsewhere in the meantime, so it can wait until its own host has proved stable.
            return at_home[0] if here is None or self._has_lasted(current.name) else here
        beside = [each for each in candidates if each.host == current.host]
        if beside:
            return beside[0]
        is_gone = current.worker is None or current.worker in self._observed.unresponsive
        if is_gone and self._may_wait(current) and not self._has_lasted(current.name):
            return None
        return candidates[0]

    def _may_stay(self, proxy: ProxyRecord, at: WorkerInfo) -> bool:
        """Return whether a proxy is on its worker, and on the port of the options."""
        # The instance may have been started again, on the same cluster, with another port.
        return proxy.worker == at.address and (not self._rules.port or proxy.port in (0, self._rules.port))

    def _may_wait(self, proxy: ProxyRecord) -> bool:
        return proxy.start_id == self._rules.start_id

    def _has_lasted(self, name: str) -> bool:
        """Return whether a proxy has had a reason to move for the grace period."""
        since = self._observed.proxies_apart.get(name, self._now)
        ends_at = since + self._rules.return_grace_s
        if self._now >= ends_at:
            return True
        self._result.apart[name] = since
        self._result.wake_at = min(ends_at, self._result.wake_at or ends_at)
        return False

    def _with_home(self, proxy: ProxyRecord, before: ProxyRecord) -> ProxyRecord:
        """Return a new record with the address to which its proxy returns, if it differs."""
        home, home_port = before.home or before.host, before.home_port or before.port
        if proxy.host != before.host:
            self._result.messages.append(self._move(proxy, before, home))
        return proxy if proxy.host == home else replace(proxy, home=home, home_port=home_port)

    def _move(self, proxy: ProxyRecord, before: ProxyRecord, home: str) -> str:
        if proxy.host == home:
            return f"Proxy {proxy.name} moves back from host {before.host} to host {home}"
        return (
            f"Proxy {proxy.name} moves from host {before.host}, which has no worker for it, to host "
            f"{proxy.host}; it moves back once host {home} has one"
        )
