"""Bin packing: finds workers with room for bundles that are placed together, all or none. Pure.

The largest bundles are placed first, each on its best worker. If that leaves no room for another bundle, the
search backtracks, for at most `TRIES` steps, because the problem is NP-hard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from daskserve.common.types import WorkerAddress
from daskserve.options.placement import Strategy

#: Tolerance for rounding errors, so that ten replicas with 0.1 CPU fit on 1 CPU.
TOLERANCE = 1e-9
#: Maximum number of steps of a search, in addition to one for each bundle.
TRIES = 200

Amounts: TypeAlias = Mapping[str, float]
#: Returns a sort key of a worker; better workers come first.
Rank: TypeAlias = Callable[[WorkerAddress], tuple[Any, ...]]


@dataclass(slots=True)
class FreeResources:
    """The free resources of some workers while bundles are placed there.

    Attributes
    ----------
    by_worker
        The free amounts of each worker, of each resource that a bundle needs.
    hosts
        The host of each worker.
    per_host
        The number of bundles that each host may still get; None without a limit.
    """

    by_worker: dict[WorkerAddress, dict[str, float]]
    hosts: Mapping[WorkerAddress, str]
    per_host: Counter[str] | None = None

    def has(self, worker: WorkerAddress, amounts: Amounts) -> bool:
        """Return whether a worker has these amounts left."""
        if self.per_host is not None and self.per_host[self.hosts[worker]] < 1:
            return False
        free = self.by_worker[worker]
        return all(amount <= free[name] + TOLERANCE for name, amount in amounts.items())

    def take(self, worker: WorkerAddress, amounts: Amounts, count: int = 1) -> None:
        """Place a bundle on a worker; a ``count`` of -1 removes it."""
        free = self.by_worker[worker]
        for name, amount in amounts.items():
            free[name] -= count * amount
        if self.per_host is not None:
            self.per_host[self.hosts[worker]] -= count


def fit(
    free_resources: FreeResources, bundles: Sequence[Amounts], strategy: Strategy, rank: Rank
) -> tuple[WorkerAddress, ...] | None:
    """Place all bundles and return their workers; if they do not all fit, return None and change nothing."""
    ranks = {each: rank(each) for each in free_resources.by_worker}
    free = total(free_resources.by_worker.values())
    order = sorted(range(len(bundles)), key=lambda place: _largest_first(bundles[place], free))
    for area in _areas(free_resources, bundles, strategy, ranks):
        chosen = _Search(free_resources, area, [bundles[place] for place in order], strategy, ranks).run()
        if chosen is not None:
            by_place = dict(zip(order, chosen, strict=True))
            return tuple(by_place[place] for place in range(len(bundles)))
    return None


def fill(free: dict[str, float], amounts: Amounts, count: int) -> int:
    """Subtract these amounts as often as possible, at most ``count`` times; return the number of times."""
    most: float = count
    for name, amount in amounts.items():
        if amount > 0:
            most = min(most, (free.get(name, 0) + TOLERANCE) / amount)
    times = max(0, math.floor(most))
    for name, amount in amounts.items():
        free[name] = free.get(name, 0) - times * amount
    return times


def total(amounts: Iterable[Amounts]) -> dict[str, float]:
    """Return the sums of amounts by resource."""
    found: dict[str, float] = {}
    for each in amounts:
        for name, amount in each.items():
            found[name] = found.get(name, 0) + amount
    return found


def by_host(
    free_resources: FreeResources, workers: Iterable[WorkerAddress]
) -> dict[str, list[WorkerAddress]]:
    """Return workers by host, in order."""
    found: dict[str, list[WorkerAddress]] = {}
    for each in workers:
        found.setdefault(free_resources.hosts[each], []).append(each)
    return found


def _largest_first(bundle: Amounts, free: Amounts) -> tuple[Any, ...]:
    """Return the key that sorts bundles by their largest share of a resource; equal bundles are neighbors."""
    shares = (amount / free[name] if free[name] > 0 else amount for name, amount in bundle.items())
    return (-max(shares, default=0.0), sorted(bundle.items()))


def _areas(
    free_resources: FreeResources,
    bundles: Sequence[Amounts],
    strategy: Strategy,
    ranks: Mapping[WorkerAddress, tuple[Any, ...]],
) -> Iterator[list[WorkerAddress]]:
    """Yield the sets of workers on which all bundles may be placed, the best first."""
    workers = sorted(free_resources.by_worker, key=ranks.__getitem__)
    if strategy in ("PACK", "STRICT_PACK"):
        whole = total(bundles)
        yield from ([each] for each in workers if free_resources.has(each, whole))
        yield from sorted(
            (each for each in by_host(free_resources, workers).values() if len(each) > 1), key=len
        )
    if strategy != "STRICT_PACK":
        yield workers


class _Search:
    """One search, within some workers; equal bundles are neighbors."""

    def __init__(
        self,
        free_resources: FreeResources,
        area: Sequence[WorkerAddress],
        bundles: Sequence[Amounts],
        strategy: Strategy,
        ranks: Mapping[WorkerAddress, tuple[Any, ...]],
    ) -> None:
        self._free_resources = free_resources
        self._area = area
        self._bundles = bundles
        self._packs = strategy in ("PACK", "STRICT_PACK")
        self._is_apart = strategy == "STRICT_SPREAD"
        self._ranks = ranks
        self._chosen: list[WorkerAddress] = []
        # The number of bundles placed on each worker and on each host.
        self._mates: Counter[WorkerAddress] = Counter()
        self._near: Counter[str] = Counter()

    def run(self) -> list[WorkerAddress] | None:
        """Place all bundles and return their workers; if that fails, return None and change nothing."""
        if not self._may_fit():
            return None
        trails, is_new = [self._candidates()], True
        for _ in range(TRIES + len(self._bundles)):
            if trails[-1]:
                self._take(trails[-1].pop(0))
                if len(self._chosen) == len(self._bundles):
                    return self._chosen
                trails.append(self._candidates())
                is_new = True
            elif self._go_back(trails, is_stuck=is_new):
                is_new = False
            else:
                return None
        while self._chosen:
            self._take_back()
        return None

    def _may_fit(self) -> bool:
        """Return whether the workers have enough resources for all bundles in total."""
        if self._is_apart and len(by_host(self._free_resources, self._area)) < len(self._bundles):
            return False
        free = total(self._free_resources.by_worker[each] for each in self._area)
        needed = total(self._bundles)
        return all(amount <= free.get(name, 0) + TOLERANCE for name, amount in needed.items())

    def _go_back(self, trails: list[list[WorkerAddress]], *, is_stuck: bool) -> bool:
        """Remove the last bundle for which another worker may help; return whether there is one.

        ``is_stuck`` means that no worker had room for the next bundle. Moving an equal bundle does not help
        then, because equal bundles are interchangeable.
        """
        trails.pop()
        last = self._bundles[len(self._chosen)]
        while is_stuck and self._chosen and self._bundles[len(self._chosen) - 1] == last:
            trails.pop()
            self._take_back()
        if not self._chosen:
            return False
        self._take_back()
        return True

    def _candidates(self) -> list[WorkerAddress]:
        """Return the workers that have room for the next bundle, the best first."""
        free_resources, mates, near, ranks = self._free_resources, self._mates, self._near, self._ranks
        amounts = self._bundles[len(self._chosen)]
        able = [
            each
            for each in self._area
            if free_resources.has(each, amounts) and not (self._is_apart and near[free_resources.hosts[each]])
        ]
        if not self._packs:
            return sorted(able, key=lambda each: (mates[each], near[free_resources.hosts[each]], ranks[each]))
        opens = not any(mates[each] for each in able)
        fits = {each: self._count_fitting(each) if opens else 0 for each in able}
        return sorted(
            able, key=lambda each: (-mates[each], -fits[each], -near[free_resources.hosts[each]], ranks[each])
        )

    def _count_fitting(self, worker: WorkerAddress) -> int:
        """Return how many of the next bundles fit on a worker at the same time."""
        free, count = dict(self._free_resources.by_worker[worker]), 0
        for amounts in self._bundles[len(self._chosen) :]:
            if all(amount <= free[name] + TOLERANCE for name, amount in amounts.items()):
                count += 1
                for name, amount in amounts.items():
                    free[name] -= amount
        return count

    def _take(self, worker: WorkerAddress) -> None:
        self._free_resources.take(worker, self._bundles[len(self._chosen)])
        self._chosen.append(worker)
        self._mates[worker] += 1
        self._near[self._free_resources.hosts[worker]] += 1

    def _take_back(self) -> None:
        worker = self._chosen.pop()
        self._free_resources.take(worker, self._bundles[len(self._chosen)], -1)
        self._mates[worker] -= 1
        self._near[self._free_resources.hosts[worker]] -= 1
