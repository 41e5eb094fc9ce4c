"""Decides which replicas apply a changed config, and when. Pure.

All replicas apply a change of options at once, while they serve. A change of ``user_config`` runs user code,
which may take long, and the replica gets no requests during that time. The change is therefore applied
replica by replica, or gang by gang: to at most ``max_unavailable`` of them at a time, but to at least one.
Replicas that are still starting count as unavailable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from daskserve.common.types import ReplicaState, ReplicaTag
from daskserve.control.backend import gangs
from daskserve.control.records.config_ids import UNKNOWN_CONFIG, in_doubt, is_outdated, is_pausing
from daskserve.control.records.records import BackendRecord, ReplicaRecord


def next_to_reconfigure(
    backend: BackendRecord,
    replicas: Iterable[ReplicaRecord],
    *,
    barred: Collection[ReplicaTag] = (),
) -> set[ReplicaTag]:
    """Return the tags of the replicas to reconfigure now, or again.

    ``barred`` are the replicas that cannot be reconfigured yet.
    """
    current = [each for each in replicas if each.version == backend.version]
    running = [each for each in current if each.state is ReplicaState.RUNNING]
    outdated = [each for each in running if is_outdated(backend, each)]
    now = {
        each.tag
        for each in outdated
        if in_doubt(each.config_id, backend.config_id) != UNKNOWN_CONFIG or is_pausing(backend, each)
    }
    later = [each for each in outdated if each.tag not in now]
    if not later:
        return now
    size = backend.gang_size
    wanted = backend.version_replicas // size
    limit = max(1, backend.config.unavailable(wanted))
    pausing = [each for each in running if is_pausing(backend, each)]
    starting = sum(each.state is ReplicaState.STARTING for each in current)
    serving = len(running) - len(pausing)
    room = limit - _units(pausing, size)
    if starting:
        room = min(room, limit - max(0, wanted - serving // size))
    for members in gangs.by_gang(later) if size > 1 else [(each,) for each in later]:
        if room <= 0:
            break
        if not any(each.tag in barred for each in members):
            now.update(each.tag for each in members)
            room -= 1
    return now


def _units(replicas: Collection[ReplicaRecord], size: int) -> int:
    return len(replicas) if size == 1 else len(list(gangs.by_gang(replicas)))
