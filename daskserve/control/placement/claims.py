"""Claims of waiting replicas on resources that Dask's tasks hold. Pure.

Without a claim, the scheduler would give a worker's GPU to one task after another, and a replica would wait
for all of them. With a claim, the scheduler gives the GPU to no other task.
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

#: Maximum number of replicas or gangs with claims at a time, because placing each of them takes time.
MOST_AT_ONCE = 32


def claims(
    state: State, workers: Iterable[WorkerInfo], waiting: Sequence[Demand]
) -> dict[WorkerAddress, dict[str, float]]:
    """Return the declared resources of each worker that waiting replicas get once tasks release them."""
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
    """Return a phrase with the needed resources that tasks hold; empty if there are none."""
    held = total(each.taken_by_tasks for each in workers)
    names = sorted(held.keys() & total(demand.bundles).keys())
    amounts = ", ".join(f"{name} {shown(held[name])}" for name in names)
    return f"; Dask's tasks hold {amounts}" if amounts else ""
