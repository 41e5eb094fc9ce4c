"""Computes how many workers an adaptive cluster should add for waiting replicas. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import WorkerInfo
from daskserve.control.placement.bin_packing import Amounts, fill, total
from daskserve.control.placement.placement import Demand, capacity


@dataclass(slots=True)
class _NewWorker:
    """A new worker like an existing one, and its free resources."""

    kind: WorkerInfo
    free: dict[str, float]

    def may_take(self, demand: Demand) -> bool:
        # A new worker has another address and name, but may be on the same host.
        return demand.allowed_workers is None or self.kind.host in demand.allowed_workers


def workers_needed(waiting: Iterable[Demand], workers: Iterable[WorkerInfo]) -> int:
    """Return the number of additional workers, like the existing ones, that the waiting replicas would fill.

    Replicas that do not fit even on an empty worker do not count. Replicas that need another host count only
    if each worker has its own host, because otherwise new workers would join the existing hosts.
    """
    known = [worker for worker in workers if not worker.is_system]
    have_own_hosts = len({worker.host for worker in known}) == len(known)
    new = _NewWorkers(known)
    singles: dict[tuple[Any, ...], Demand] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    apart = []
    is_any = False
    for demand in waiting:
        is_apart = demand.strategy == "STRICT_SPREAD" and len(demand.bundles) > 1
        if (demand.most_per_host is not None or is_apart) and not have_own_hosts:
            continue
        is_any = True
        if not all(new.kind_for(demand, amounts) for amounts in demand.bundles):
            continue
        if is_apart:
            apart.append(demand)
            continue
        for amounts in new.parts(demand):
            backend = None if demand.most_per_host is None else demand.backend
            key = (tuple(sorted(amounts.items())), demand.allowed_workers, backend)
            singles[key] = replace(demand, bundles=(amounts,))
            counts[key] += 1
    for key, demand in singles.items():
        new.add(demand, counts[key])
    for demand in apart:
        new.add_apart(demand)
    return max(len(new.filled), int(is_any and not known))


class _NewWorkers:
    """The workers to add."""

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self._kinds = [_NewWorker(each, capacity(each)) for each in workers]
        self.filled: list[_NewWorker] = []

    def kind_for(self, demand: Demand, amounts: Amounts) -> _NewWorker | None:
        """Return an empty worker that has room for these amounts, if there is one."""
        return next(
            (each for each in self._kinds if each.may_take(demand) and fill(dict(each.free), amounts, 1)),
            None,
        )

    def parts(self, demand: Demand) -> Sequence[Amounts]:
        """Return the units that need one worker each: single bundles, or all bundles together."""
        whole = total(demand.bundles)
        # If no worker has room for all bundles, several workers of one host may hold them.
        is_one = demand.strategy == "STRICT_PACK" and self.kind_for(demand, whole) is not None
        return (whole,) if is_one else demand.bundles

    def add(self, demand: Demand, count: int) -> None:
        """Add workers for ``count`` replicas or bundles."""
        (amounts,) = demand.bundles
        most = demand.most_per_host
        for worker in self.filled:
            if worker.may_take(demand):
                count -= fill(worker.free, amounts, count if most is None else min(count, most))
        while count:
            count -= fill(
                self._another(demand, amounts), amounts, count if most is None else min(count, most)
            )

    def add_apart(self, demand: Demand) -> None:
        """Add workers for bundles that all need different hosts."""
        others = [each for each in self.filled if each.may_take(demand)]
        for amounts in demand.bundles:
            found = next((each for each in others if fill(each.free, amounts, 1)), None)
            if found is None:
                fill(self._another(demand, amounts), amounts, 1)
            else:
                others = [each for each in others if each is not found]

    def _another(self, demand: Demand, amounts: Amounts) -> dict[str, float]:
        kind = self.kind_for(demand, amounts)
        assert kind is not None
        self.filled.append(_NewWorker(kind.kind, dict(kind.free)))
        return self.filled[-1].free
