"""The resources held by Dask's tasks that waiting replicas would use. Pure.

Without a claim, the scheduler would give a worker's GPU to one task after another, and a replica would wait
for all of them. With one, the scheduler gives the GPU to no further task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from daskserve.common.copying import replace
from daskserve.common.formatting import shown
from daskserve.common.types import WorkerAddress, WorkerInfo
from daskserve.control.placement.bin_packing import total
from daskserve.control.placement.placement import Demand, TentativeUsage, place
from daskserve.control.records.state import State
from daskserve.options.actor import ACCELERATOR

#: How many replicas or gangs claim at a time; a place for each takes time, and the others follow.
MOST_AT_ONCE = 32


def claims(
    state: State, workers: Iterable[WorkerInfo], waiting: Sequence[Demand]
) -> dict[WorkerAddress, dict[str, float]]:
    """Return the amounts of declared resources that the waiting replicas get once tasks let them go."""
    known = {each.address: each for each in workers}
    found: dict[WorkerAddress, dict[str, float]] = {}
    if not any(each.taken_by_tasks for each in known.values()):
        return found
    without_tasks = [replace(each, taken_by_tasks={}) for each in known.values()]
    usage = TentativeUsage(state, {})
    for demand in waiting[:MOST_AT_ONCE]:
        for worker, amounts in zip(place(usage, without_tasks, demand) or (), demand.bundles, strict=False):
            usage.occupy(demand.backend, worker, amounts)
            for name in amounts.keys() & known[worker].resources.keys():
                if not name.startswith(ACCELERATOR):
                    mine = found.setdefault(worker, {})
                    mine[name] = mine.get(name, 0.0) + amounts[name]
    return found


def held_by_tasks(workers: Iterable[WorkerInfo], demand: Demand) -> str:
    """Return the end of a sentence about what tasks hold of the resources of a demand; empty if nothing."""
    held = total(each.taken_by_tasks for each in workers)
    names = sorted(held.keys() & total(demand.bundles).keys())
    amounts = ", ".join(f"{name} {shown(held[name])}" for name in names)
    return f"; Dask's tasks hold {amounts}" if amounts else ""
