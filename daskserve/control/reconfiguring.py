"""Which replicas take over a changed config, and when. Pure.

A change of options reaches all replicas at once: they take it over in no time, while they serve. A change of
``user_config`` runs user code that may take long, and a replica takes no requests meanwhile. So it goes
replica by replica, or gang by gang: at most ``max_unavailable`` of them at a time, but at least one, or it
would never end. While others are missing because they start, the next one waits for them.

The id of a config shows what differs. Its second part stands for the ``user_config``. A replica whose record
has no id is being reconfigured: either config may be in force. The records are enough for a new controller
to go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import msgpack

from daskserve.control import gangs
from daskserve.control.records import BackendRecord, ReplicaRecord
from daskserve.options.backend import BackendConfig
from daskserve.types import ReplicaState, ReplicaTag

#: The config id of a replica that has not yet answered a change of its ``user_config``.
UNKNOWN_CONFIG = ""
_SEPARATOR = "-"


def config_id(config: BackendConfig, user_config: bytes | None) -> str:
    """Return the id of what replicas read of a config."""
    options = config.for_replicas(exclude_unset=True)
    options["concurrency"] = config.concurrency()
    whole = hashlib.sha256(msgpack.packb(sorted(options.items())) + (user_config or b""))
    code = "none" if user_config is None else hashlib.sha256(user_config).hexdigest()[:8]
    return f"{whole.hexdigest()[:16]}{_SEPARATOR}{code}"


def is_same(one: str, other: str) -> bool:
    """Return whether two ids stand for one config; those of older stores have no second part."""
    (whole, separator, _), (other_whole, other_separator, _) = (
        each.partition(_SEPARATOR) for each in (one, other)
    )
    return one == other or (bool(whole) and whole == other_whole and separator != other_separator)


def in_doubt(current: str, wanted: str) -> str:
    """Return the id of a replica with one config that is told another one, until it has answered."""
    _, separator, code = wanted.partition(_SEPARATOR)
    is_same_code = bool(separator) and current.partition(_SEPARATOR)[1:] == (separator, code)
    return f"{_SEPARATOR}{code}" if is_same_code else UNKNOWN_CONFIG


def is_outdated(backend: BackendRecord, replica: ReplicaRecord) -> bool:
    """Return whether a replica of the right version runs with an old config."""
    return replica.version == backend.version and replica.config_id != backend.config_id


def is_pausing(backend: BackendRecord, replica: ReplicaRecord) -> bool:
    """Return whether a replica takes no requests because its user code is being reconfigured."""
    return is_outdated(backend, replica) and replica.config_id == UNKNOWN_CONFIG


def next_to_reconfigure(
    backend: BackendRecord,
    replicas: Iterable[ReplicaRecord],
    *,
    barred: Collection[ReplicaTag] = (),
) -> set[ReplicaTag]:
    """Return the tags of the replicas that are told the config of the backend now, or again.

    ``barred`` are replicas that cannot be told yet.
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
    wanted = backend.num_replicas // size
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
