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

#: The kinds of records whose last changes a power loss of the scheduler's machine may take back: of what runs
#: without a record, the next controller stops what it does not want, and starts others. What a
#: caller has been told, and what it asked for, is in others.
PASSING = ("replica/", "proxy/")
#: Those with which a transaction may wait: an event is about what it is written with.
_MAY_WAIT = (*PASSING, "event/", "deaths/")


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


def encoded(records: Mapping[str, Record]) -> dict[str, bytes]:
    """Return records as a store keeps them."""
    return {key: encode(record) for key, record in records.items()}


async def write(store: Store, epoch: int, change: Change, *, must_last: bool = True) -> Change:
    """Store a change as one transaction, and return it as stored; see `StoreChange.must_last`."""
    if change:
        try:
            encoded = _encoded(change)
        except UnicodeEncodeError:  # a text of user code, which must not keep its replica from being replaced
            change = {key: record and encodable(key, record) for key, record in change.items()}
            encoded = _encoded(change)
        may_wait = not must_last and all(key.startswith(_MAY_WAIT) for key in change)
        await store.commit(epoch, StoreChange(encoded, _parcels(change), must_last, may_wait))
    return change


def _encoded(change: Change) -> dict[str, bytes | None]:
    return {key: None if record is None else encode(record) for key, record in change.items()}


async def rewrite(store: Store, epoch: int, state: State, unreadable: Collection[str]) -> int:
    """Replace all records in the store by those of the state, and return their number."""
    records = state.records()
    encoded = {key: encode(record) for key, record in records.items()}
    await store.rewrite(epoch, StoreChange(encoded, _parcels(records)), sorted(unreadable))
    return len(encoded)


def _parcels(change: Mapping[str, Record | None]) -> dict[str, str]:
    codes = [record for record in change.values() if isinstance(record, CodeRecord)]
    found = {code.name: Parcel.labelled(code.code) for code in codes}
    return {name: parcel.digest for name, parcel in found.items() if parcel is not None}
