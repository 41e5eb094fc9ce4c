"""The ids of configs: comparing them shows how the config of a replica differs from its backend's. Pure.

The second part of an id is a digest of the ``user_config``. A replica without an id in its record is being
reconfigured, and may run with the old or the new config. A new controller needs nothing but the records.
"""

from __future__ import annotations

import hashlib

import msgpack

from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.options.backend import BackendConfig

#: The config id of a replica that has not yet confirmed a change of its ``user_config``.
UNKNOWN_CONFIG = ""
_SEPARATOR = "-"


def config_id(config: BackendConfig, user_config: bytes | None) -> str:
    """Return the id of the options that replicas read."""
    options = config.for_replicas(exclude_unset=True)
    options["concurrency"] = config.concurrency()
    whole = hashlib.sha256(msgpack.packb(sorted(options.items())) + (user_config or b""))
    code = "none" if user_config is None else hashlib.sha256(user_config).hexdigest()[:8]
    return f"{whole.hexdigest()[:16]}{_SEPARATOR}{code}"


def is_same(one: str, other: str) -> bool:
    """Return whether two ids are for the same config; ids from older stores have no second part."""
    (whole, separator, _), (other_whole, other_separator, _) = (
        each.partition(_SEPARATOR) for each in (one, other)
    )
    return one == other or (bool(whole) and whole == other_whole and separator != other_separator)


def in_doubt(current: str, wanted: str) -> str:
    """Return the config id of a replica that is being reconfigured and has not confirmed the new config."""
    _, separator, code = wanted.partition(_SEPARATOR)
    is_same_code = bool(separator) and current.partition(_SEPARATOR)[1:] == (separator, code)
    return f"{_SEPARATOR}{code}" if is_same_code else UNKNOWN_CONFIG


def is_outdated(backend: BackendRecord, replica: ReplicaRecord) -> bool:
    """Return whether a replica of the target version runs with an old config."""
    return replica.version == backend.version and replica.config_id != backend.config_id


def is_pausing(backend: BackendRecord, replica: ReplicaRecord) -> bool:
    """Return whether a replica gets no requests because its user code is being reconfigured."""
    return is_outdated(backend, replica) and replica.config_id == UNKNOWN_CONFIG
