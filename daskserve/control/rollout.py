"""Which replicas to start and which to give up, so that a backend gets to its wanted version and number.

New before old: a replica of an older version is given up only for one of the wanted version that runs, so
the number that can answer never falls below what is wanted (``max_unavailable`` is 0). At most ``max_surge``
replicas more than wanted exist meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from daskserve.control.records import ReplicaRecord
from daskserve.control.replica_lifecycle import STOP_ORDER, WANTED_STATES
from daskserve.types import ReplicaState, ReplicaTag, WorkerAddress

MAX_SURGE = 1


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do now: how many new replicas to begin, which ones to give up."""

    start: int
    stop: tuple[ReplicaRecord, ...]


@dataclass(frozen=True, slots=True)
class Burdens:
    """What decides which of several replicas is missed least.

    Attributes
    ----------
    ongoing : mapping
        How many requests each runs, as far as is known.
    others : callable
        How much a worker holds beside replicas of this backend.
    empties_workers : bool
        Whether it helps to have nothing left on a worker, because the cluster then gives it back. Otherwise
        replicas are to stay spread.
    """

    ongoing: Mapping[ReplicaTag, float] = field(default_factory=dict)
    others: Callable[[WorkerAddress], int] = lambda worker: 0
    empties_workers: bool = False


_NO_BURDENS = Burdens()


def next_steps(
    wanted: int,
    version: str,
    replicas: Sequence[ReplicaRecord],
    *,
    max_surge: int = MAX_SURGE,
    leaving: Collection[WorkerAddress] = (),
    burdens: Burdens = _NO_BURDENS,
) -> Steps:
    """Return the next steps towards ``wanted`` replicas of ``version``.

    Replicas on workers that are ``leaving`` are treated like those of an older version.
    """
    live = [each for each in replicas if each.state in WANTED_STATES]
    new = [each for each in live if each.version == version and each.worker not in leaving]
    old = [each for each in live if each.version != version or each.worker in leaving]
    excess = _expendable(new, max(0, len(new) - wanted), burdens)
    new = [each for each in new if each not in excess]
    # Old replicas that do not run yet are of no use to anybody.
    idle_old = [each for each in old if each.state is not ReplicaState.RUNNING]
    serving_old = [each for each in old if each.state is ReplicaState.RUNNING]
    serving_new = sum(each.state is ReplicaState.RUNNING for each in new)
    surplus = max(0, len(serving_old) + serving_new - wanted)
    stop = (*excess, *idle_old, *serving_old[:surplus])
    room = wanted + (max_surge if old else 0) - (len(live) - len(stop))
    return Steps(max(0, min(wanted - len(new), room)), stop)


def _expendable(replicas: Sequence[ReplicaRecord], count: int, burdens: Burdens) -> tuple[ReplicaRecord, ...]:
    """Return the replicas to give up first: those that do the least, the youngest among them.

    Of those that run, the ones where most of their kind are, so that the rest stays spread; or, where workers
    can be given back, the ones where least is.
    """
    left = list(reversed(replicas))
    chosen: list[ReplicaRecord] = []
    same = Counter(each.worker for each in left)

    def rank(each: ReplicaRecord) -> tuple[float, ...]:
        others = 0 if each.worker is None else burdens.others(each.worker)
        crowd = others + same[each.worker] if burdens.empties_workers else -same[each.worker]
        return (STOP_ORDER.index(each.state), crowd, burdens.ongoing.get(each.tag, 0.0), others)

    while len(chosen) < count:
        least = min(left, key=rank)
        left.remove(least)
        same[least.worker] -= 1
        chosen.append(least)
    return tuple(chosen)
