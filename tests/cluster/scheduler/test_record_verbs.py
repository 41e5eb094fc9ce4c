"""Which controllers may write the records of an instance."""

from __future__ import annotations

from typing import Any

import pytest

from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.records import record_verbs
from daskserve.cluster.store.opening import MemoryStore
from daskserve.errors import StaleEpochError, UnavailableError


def instance(epoch: int) -> Instance:
    start = {"instance": "a", "owner": None, "owns_cluster": False, "grace_s": 0.0, "payload": b""}
    entry = Instance.started_by(start, MemoryStore())
    entry.epoch = epoch
    return entry


async def commit(entry: Instance, epoch: int) -> None:
    verbs: dict[str, Any] = record_verbs(lambda name: entry)
    await verbs["commit_records"]("a", epoch=epoch, records={"backend/b": b"..."}, parcels={})


async def test_only_the_newest_controller_writes() -> None:
    entry = instance(epoch=2)
    await commit(entry, 2)
    with pytest.raises(StaleEpochError):
        await commit(entry, 1)


async def test_a_controller_of_another_scheduler_writes_nothing_while_its_instance_comes_back() -> None:
    entry = instance(epoch=0)
    with pytest.raises(UnavailableError, match="is recovering and has no new controller yet"):
        await commit(entry, 7)
    assert await entry.store.load() == {}
