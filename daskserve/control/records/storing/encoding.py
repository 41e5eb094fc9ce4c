"""Records as bytes in the store, and as plain values inside other records. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgpack

from daskserve.common.types import ReplicaState
from daskserve.control.records.records import (
    KINDS,
    TUPLES,
    BackendRecord,
    EndpointRecord,
    GoalRecord,
    GoalState,
    Record,
    fields_of,
)
from daskserve.control.records.revisions import RevisionState
from daskserve.control.records.rollout import RolloutState
from daskserve.errors import InstanceError
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.payload.error_text import summary_of

FORMAT = 1
#: Maximum number of characters of a reason, because an error may contain a whole record.
MAX_REASON = 200
_ENUMS: Mapping[str, type[enum.StrEnum]] = {
    "replica": ReplicaState,
    "goal": GoalState,
    "revision": RevisionState,
}


class CorruptRecordError(InstanceError):
    """A stored record cannot be read."""


def encode(record: Record) -> bytes:
    """Return a record as bytes that contain the format number."""
    return bytes(msgpack.packb({"format": FORMAT, "fields": fields_of(record)}))


def encodable(key: str, record: Record) -> Record:
    """Return a record as `encode` accepts it: surrogates in its strings become backslash escapes."""
    stored = {"format": FORMAT, "fields": fields_of(record)}
    return decode(key, msgpack.packb(stored, unicode_errors="backslashreplace"))


def decode(key: str, data: bytes) -> Record:
    """Return the record stored under ``key``.

    Raises
    ------
    CorruptRecordError
        The bytes are not a record, or a newer daskserve wrote them.
    """
    kind = key.partition("/")[0]
    try:
        stored = msgpack.unpackb(data)
        if stored["format"] > FORMAT:
            raise CorruptRecordError(
                f"Record {key!r} has format {stored['format']}; this daskserve reads up to {FORMAT}. "
                "Use a newer one."
            )
        record: Record = from_plain(kind, stored["fields"])
        return record
    except CorruptRecordError:
        raise
    except Exception as error:
        what = summary_of(error)[:MAX_REASON]
        raise CorruptRecordError(f"Record {key!r} cannot be read: {what}") from error


def from_plain(kind: str, values: Mapping[str, Any]) -> Any:
    """Return a record from the plain values that `to_plain` returned."""
    changed = dict(values)
    if kind in _ENUMS:
        changed["state"] = _ENUMS[kind](changed["state"])
    for name in TUPLES:
        if name in changed:
            changed[name] = tuple(changed[name])
    if "scalings" in changed:
        changed["scalings"] = tuple(tuple(each) for each in changed["scalings"])
    if kind == BackendRecord.KIND:
        if "concurrency" in changed:
            changed = _backend_with_demand(changed)
        changed["config"] = BackendConfig(**changed["config"])
        changed["actor_options"] = ActorOptions(**changed["actor_options"])
        if changed.get("rollout") is not None:
            changed["rollout"] = RolloutState.from_plain(changed["rollout"])
    if kind == GoalRecord.KIND and "application" not in changed:
        changed = _goal_of_one_backend(changed)
    return KINDS[kind](**changed)


def _backend_with_demand(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a backend written by an earlier daskserve, with ``demand`` added."""
    options = dict(values["actor_options"])
    env = options.pop("env", None)
    for derived in ("demand", "isolation"):
        options.pop(derived, None)
    config = dict(values["config"])
    if metadata := config.get("internal_metadata"):
        config["internal_metadata"] = {name: each for name, each in metadata.items() if each is not None}
    others = {name: value for name, value in values.items() if name != "concurrency"}
    return {**others, "config": config, "actor_options": options, "env": env}


def _goal_of_one_backend(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a goal written by an earlier daskserve, whose goals cover one backend each."""
    previous, endpoint = values.pop("previous"), values.pop("previous_endpoint", None)
    tag, records = values["backend"], {}
    if values["state"] == GoalState.PENDING:
        records[f"{BackendRecord.KIND}/{tag}"] = previous
    if endpoint is not None:
        records[f"{EndpointRecord.KIND}/{tag}"] = endpoint
    failures = {tag: values["failures"]} if values["failures"] else {}
    return {**values, "previous": records, "failures": failures}
