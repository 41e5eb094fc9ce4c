"""The supervisor's verbs for the records of an instance, which its controllers read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.parcels import AsyncFunction, is_row, verbs_for
from daskserve.common.types import InstanceName
from daskserve.errors import StaleEpochError, UnavailableError


def record_verbs(find: Callable[[InstanceName], Instance]) -> dict[str, AsyncFunction]:
    """Return the verbs, given the running instances."""
    return verbs_for(
        find,
        load_records=_load,
        commit_records=_commit,
        rewrite_records=_rewrite,
        take_over_records=_take_over,
    )


async def _load(entry: Instance) -> dict[str, Any]:
    records = entry.parcels.without_rows(await entry.store.load())
    return {"records": records, **_condition(entry)}


def _condition(entry: Instance) -> dict[str, Any]:
    return {"problems": dict(entry.store.problems()), "hold": entry.store.ownership.value}


async def _commit(
    entry: Instance,
    epoch: int,
    records: Mapping[str, bytes | None],
    parcels: Mapping[str, str],
    must_last: bool = True,
    may_wait: bool = False,
) -> dict[str, Any]:
    """Write a transaction; return the store's condition."""
    check_epoch(entry, epoch)
    await entry.parcels.recall(parcels)
    rows = entry.parcels.rows_of(records, parcels)
    change = StoreChange({**records, **rows}, must_last=must_last, may_wait=may_wait)
    await entry.store.commit(epoch, change)
    entry.parcels.committed(records, parcels)
    return _condition(entry)


async def _rewrite(
    entry: Instance,
    epoch: int,
    records: Mapping[str, bytes],
    parcels: Mapping[str, str],
    unreadable: Sequence[str],
) -> dict[str, Any]:
    """Replace all records in the store; return its condition."""
    check_epoch(entry, epoch)
    rows = await entry.parcels.all_rows(parcels)
    await entry.store.rewrite(epoch, StoreChange({**records, **rows}), unreadable)
    return _condition(entry)


async def _take_over(entry: Instance, epoch: int, is_complete: bool, own: Sequence[str]) -> dict[str, Any]:
    """Take ownership of the records; return the changes by others, or None if it is too early."""
    check_epoch(entry, epoch)
    changed = await entry.store.take_over(epoch, is_complete=is_complete, own=own)
    if changed and any(map(is_row, changed)):
        entry.parcels.without_rows(await entry.store.load())  # counts the rows of parcels
    records = None if changed is None else {key: each for key, each in changed.items() if not is_row(key)}
    return {"changed": records, **_condition(entry)}


def check_epoch(entry: Instance, epoch: int) -> None:
    """Raise an error unless an epoch is that of the newest controller."""
    if not entry.epoch:
        # A controller that outlived another scheduler treats workers that have not rejoined yet as lost.
        raise UnavailableError(
            f"Instance {entry.name!r} is recovering and has no new controller yet; try again."
        )
    if epoch < entry.epoch:
        # The store itself refuses the old epoch only after the new controller's first write.
        raise StaleEpochError(f"Controller epoch {epoch} was replaced by {entry.epoch}.")
