"""Which replicas to start and which to give up, so that a backend gets to its wanted version and number.

New before old: a replica of an older version is given up only for one of the wanted version that runs, so
the number that can answer never falls below what is wanted (``max_unavailable`` is 0). At most ``max_surge``
replicas more than wanted exist meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from daskserve.control.records import ReplicaRecord
from daskserve.control.replica_lifecycle import STOP_ORDER, WANTED_STATES
from daskserve.types import ReplicaState, WorkerAddress

MAX_SURGE = 1


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do now: how many new replicas to begin, which ones to give up."""

    start: int
    stop: tuple[ReplicaRecord, ...]


def next_steps(
    wanted: int,
    version: str,
    replicas: Sequence[ReplicaRecord],
    *,
    max_surge: int = MAX_SURGE,
    leaving: Collection[WorkerAddress] = (),
) -> Steps:
    """Return the next steps towards ``wanted`` replicas of ``version``.

    Replicas on workers that are ``leaving`` are treated like those of an older version.
    """
    live = [each for each in replicas if each.state in WANTED_STATES]
    new = [each for each in live if each.version == version and each.worker not in leaving]
    old = [each for each in live if each.version != version or each.worker in leaving]
    excess = _expendable(new, max(0, len(new) - wanted))
    new = [each for each in new if each not in excess]
    # Old replicas that do not run yet are of no use to anybody.
    idle_old = [each for each in old if each.state is not ReplicaState.RUNNING]
    serving_old = [each for each in old if each.state is ReplicaState.RUNNING]
    serving_new = sum(each.state is ReplicaState.RUNNING for each in new)
    surplus = max(0, len(serving_old) + serving_new - wanted)
    stop = (*excess, *idle_old, *serving_old[:surplus])
    room = wanted + (max_surge if old else 0) - (len(live) - len(stop))
    return Steps(max(0, min(wanted - len(new), room)), stop)


def _expendable(replicas: Sequence[ReplicaRecord], count: int) -> tuple[ReplicaRecord, ...]:
    """Return the replicas to give up first: those that do the least, the youngest among them."""
    youngest_first = list(reversed(replicas))
    ordered = sorted(youngest_first, key=lambda each: STOP_ORDER.index(each.state))
    return tuple(ordered[:count])
