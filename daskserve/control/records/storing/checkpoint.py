"""Reads the state from the store when a controller starts, and writes changes before it acts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from daskserve.cluster.protocols.base import Store, StoreChange
from daskserve.control.records.records import Change, CodeRecord, Record
from daskserve.control.records.state import State
from daskserve.control.records.storing.encoding import CorruptRecordError, decode, encodable, encode
from daskserve.payload.parcels import Parcel

logger = logging.getLogger("daskserve.controller")

#: The kinds of records whose last changes may be lost if the scheduler's machine loses power. The next
#: controller stops actors without a record and starts new ones. Requested changes, and the answers to
#: callers, are in records of other kinds.
TRANSIENT = ("replica/", "proxy/")
#: The kinds of records that may be written later. Events and deaths accompany other records of the same
#: change.
_MAY_WAIT = (*TRANSIENT, "event/", "deaths/")


def read(records: Mapping[str, bytes]) -> tuple[Change, dict[str, CorruptRecordError]]:
    """Return the stored records, and the reasons why some cannot be read."""
    change: Change = {}
    corrupt: dict[str, CorruptRecordError] = {}
    for key, data in records.items():
        try:
            change[key] = decode(key, data)
        except CorruptRecordError as error:
            corrupt[key] = error
    return change, corrupt


def restore(records: Mapping[str, bytes]) -> tuple[State, dict[str, CorruptRecordError]]:
    """Return the state from stored records, and the reasons why some records cannot be read."""
    change, corrupt = read(records)
    for key, error in corrupt.items():
        logger.error("Stored record %s is skipped: %s", key, error)
    state = State()
    state.apply(change)
    return state, corrupt


def encoded(change: Mapping[str, Record | None]) -> dict[str, bytes | None]:
    """Return records as a store keeps them; None for records to remove."""
    return {key: None if record is None else encode(record) for key, record in change.items()}


async def write(store: Store, epoch: int, change: Change, *, must_last: bool = True) -> Change:
    """Store a change as one transaction, and return it as stored; see `StoreChange.must_last`."""
    if change:
        try:
            records = encoded(change)
        except UnicodeEncodeError:  # a text from user code must not block the change
            change = {key: record and encodable(key, record) for key, record in change.items()}
            records = encoded(change)
        may_wait = not must_last and all(key.startswith(_MAY_WAIT) for key in change)
        await store.commit(epoch, StoreChange(records, _parcels(change), must_last, may_wait))
    return change


async def rewrite(store: Store, epoch: int, state: State, unreadable: Collection[str]) -> int:
    """Replace all records in the store with those of the state, and return their number."""
    records = state.records()
    await store.rewrite(epoch, StoreChange(encoded(records), _parcels(records)), sorted(unreadable))
    return len(records)


def _parcels(change: Mapping[str, Record | None]) -> dict[str, str]:
    codes = [record for record in change.values() if isinstance(record, CodeRecord)]
    found = {code.name: Parcel.labelled(code.code) for code in codes}
    return {name: parcel.digest for name, parcel in found.items() if parcel is not None}
