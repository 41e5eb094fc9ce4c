"""Records survive a round trip from the state to the store and back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from control_harness import backend, endpoint, goal, replica
from controller_harness import ScriptedStore, Stage, play

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store.opening import MemoryStore
from daskserve.control.records.records import Change, CodeRecord
from daskserve.control.records.storing.checkpoint import restore, write
from daskserve.control.records.storing.encoding import CorruptRecordError, encode
from daskserve.errors import StaleEpochError


class CountingStore(MemoryStore):
    """Records each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[Mapping[str, bytes | None]] = []

    async def commit(self, epoch: int, change: StoreChange) -> None:
        await super().commit(epoch, change)
        self.commits.append(change.records)


EVERYTHING: Change = {
    each.key: each
    for each in (backend(), CodeRecord("b@v1", "b", b"code"), replica("b#1"), endpoint(), goal())
}


def test_a_state_survives_a_round_trip_through_the_store() -> None:
    store = CountingStore()

    async def scenario() -> Mapping[str, bytes]:
        await write(store, 1, EVERYTHING)
        return await store.load()

    state, corrupt = restore(asyncio.run(scenario()))
    assert corrupt == {}
    assert state.backends == {"b": backend()}
    assert state.codes.of("b") == [CodeRecord("b@v1", "b", b"code")]
    assert state.replicas_of("b") == [replica("b#1")]
    assert state.endpoint_at("/e") == endpoint()
    assert state.goals == {"g": goal()}


def test_a_change_is_one_transaction_and_an_empty_change_is_none() -> None:
    store = CountingStore()

    async def scenario() -> None:
        await write(store, 1, {})
        await write(store, 1, {"backend/b": backend(), "endpoint/e": None})

    asyncio.run(scenario())
    assert store.commits == [{"backend/b": encode(backend()), "endpoint/e": None}]


async def test_a_text_that_utf8_cannot_encode_is_stored_with_escapes() -> None:
    store, bad = MemoryStore(), goal(by="cannot read caf\udce9.csv")
    written = await write(store, 1, {bad.key: bad, "endpoint/e": None})
    assert written == {bad.key: goal(by="cannot read caf\\udce9.csv"), "endpoint/e": None}
    state, _ = restore(await store.load())
    assert state.goals == {"g": written[bad.key]}


def test_a_corrupt_record_is_named_and_the_others_are_read() -> None:
    stored = {key: encode(record) for key, record in EVERYTHING.items() if record is not None}
    state, corrupt = restore({**stored, "backend/broken": b"?", "goal/g": b""})
    assert set(corrupt) == {"backend/broken", "goal/g"}
    assert all(isinstance(error, CorruptRecordError) for error in corrupt.values())
    assert list(state.backends) == ["b"]
    assert state.goals == {}


def test_a_replaced_controller_cannot_write() -> None:
    store = MemoryStore()

    async def scenario() -> None:
        await write(store, 2, {"backend/b": backend()})
        with pytest.raises(StaleEpochError, match="epoch 1 was replaced by epoch 2"):
            await write(store, 1, {"backend/b": None})
        assert list(await store.load()) == ["backend/b"]

    asyncio.run(scenario())


def test_a_deploy_costs_two_changes_that_are_synced() -> None:
    """The first records the request, the second its completion; all else may wait for the second."""
    synced: list[set[str]] = []

    class SyncingStore(ScriptedStore):
        async def commit(self, epoch: int, change: StoreChange) -> None:
            await super().commit(epoch, change)
            if change.records and not change.may_wait:
                synced.append({key.partition("/")[0] for key in change.records})

    async def scenario(stage: Stage) -> None:
        await stage.deploy(num_replicas=3)
        asked, complete = {"backend", "code", "endpoint", "goal"}, {"backend", "goal", "replica"}
        assert synced == [{*asked, "event"}, {*complete, "event"}]
        assert stage.store.commits > 2

    play(scenario, store=SyncingStore())
