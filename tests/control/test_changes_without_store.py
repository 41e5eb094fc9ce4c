"""An instance while its store is lost, and after its records have been written again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from controller_harness import ScriptedStore, Stage, play

from daskserve.cluster.protocols.base import StoreChange
from daskserve.control.records.storing.encoding import CorruptRecordError, decode
from daskserve.errors import StoreLostError


class LosingStore(ScriptedStore):
    """A store that can be lost; then writes are only kept in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False
        #: The records that the next start would find.
        self.place: dict[str, bytes] = {}

    async def commit(self, epoch: int, change: StoreChange) -> None:
        if self.is_lost and change.must_last:
            raise StoreLostError("the file was removed")
        await super().commit(epoch, change)

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        await super().rewrite(epoch, change, unreadable)
        self.is_lost, self.place = False, dict(self.data)


def losing() -> LosingStore:
    return LosingStore()


def test_changes_are_refused_and_replicas_are_still_replaced() -> None:
    store = losing()

    async def scenario(stage: Stage) -> None:
        await stage.create(num_replicas=2)
        store.is_lost = True
        with pytest.raises(StoreLostError):
            await stage.update(num_replicas=3)
        with pytest.raises(StoreLostError):
            await stage.delete()
        (victim, *_) = stage.replica_workers()
        before = set(stage.running)
        stage.cluster.remove_worker(victim)
        await stage.until(lambda: len(stage.running) == 2 and set(stage.running) != before)

    play(scenario, store=store)


def test_a_rewrite_stores_all_records_and_changes_are_taken_again() -> None:
    store = losing()

    async def scenario(stage: Stage) -> None:
        await stage.create(num_replicas=1)
        await stage.endpoint()
        store.is_lost = True
        with pytest.raises(StoreLostError):
            await stage.update(num_replicas=2)
        written = await stage.call("rewrite_store")
        assert store.place.keys() == stage.store.records().keys()
        assert len(store.place) == written
        await stage.update(num_replicas=2)
        assert len(stage.running) == 2

    play(scenario, store=store)


def test_a_record_that_cannot_be_read_is_not_lost_by_a_rewrite() -> None:
    store = losing()
    store.data["backend/newer"] = b"?"

    async def scenario(stage: Stage) -> None:
        await stage.create()
        await stage.call("rewrite_store")
        assert store.place["backend/newer"] == b"?"
        with pytest.raises(CorruptRecordError):
            decode("backend/newer", store.place["backend/newer"])

    play(scenario, store=store)
