"""Parcels at the scheduler, over every kind of store, and their transport to and from other processes."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from daskserve.cluster import parcel_memory
from daskserve.cluster.channel.wire.segments import HAS_SEGMENTS
from daskserve.cluster.parcel_memory import PIECE_BYTES, ParcelCarrier, ParcelMemory
from daskserve.cluster.protocols.base import InstanceStore, StoreChange
from daskserve.cluster.scheduler import parcels as module
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.parcels import InstanceParcels, parcel_verbs
from daskserve.cluster.scheduler.reconnect import close_records
from daskserve.cluster.store.opening import MemoryStore, open_store
from daskserve.errors import BadRequestError, CodeLoadError
from daskserve.payload.parcels import Parcel

PARTS = (b"pickle", os.urandom(PIECE_BYTES + 1000), b"x" * 100)
PARCEL = Parcel.of(PARTS)
CODE = {"code/b@1": b"label", "backend/b": b"record"}


class Scheduler:
    """The part of the supervisor that handles one instance's parcels."""

    def __init__(self, store: InstanceStore) -> None:
        self.store = store
        self.parcels = InstanceParcels(store)
        self.asked: list[str] = []

    async def ask(self, verb: str, **message: Any) -> Any:
        self.asked.append(verb)
        return await parcel_verbs(lambda _: self.parcels)[verb]("i", **message)

    async def commit(self, records: dict[str, bytes | None], parcels: dict[str, str] | None = None) -> None:
        parcels = parcels or {}
        await self.parcels.recall(parcels)
        rows = self.parcels.rows_of(records, parcels)
        await self.store.commit(1, StoreChange({**records, **rows}))
        self.parcels.committed(records, parcels)


@asynccontextmanager
async def scheduler(url: str = "memory://") -> AsyncIterator[Scheduler]:
    store = open_store(url, "i")
    await store.open()
    found = Scheduler(store)
    try:
        yield found
    finally:
        found.parcels.close()
        await store.close()


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/s"}[
        request.param
    ]


async def deploy(here: Scheduler) -> None:
    await ParcelCarrier(here.ask).send(PARCEL, PARTS)
    await here.commit(dict(CODE), {"b@1": PARCEL.digest})


async def fetched(here: Scheduler) -> tuple[bytes, ...]:
    return tuple(bytes(each) for each in await ParcelCarrier(here.ask).fetch("b@1", PARCEL))


async def test_a_parcel_is_kept_with_its_code_and_hidden_from_controllers(url: str) -> None:
    async with scheduler(url) as here:
        await deploy(here)
        assert await fetched(here) == PARTS
        records = await here.store.load()
        assert len(records) == 4
        assert here.parcels.without_rows(records) == CODE
        await here.commit({"code/b@1": None})
        assert dict(await here.store.load()) == {"backend/b": b"record"}
        assert not here.parcels._memory


@pytest.mark.parametrize("url", ["sqlite", "file"], indirect=True)
async def test_a_parcel_survives_the_scheduler(url: str) -> None:
    async with scheduler(url) as here:
        await deploy(here)
    async with scheduler(url) as here:
        assert here.parcels.without_rows(await here.store.load()) == CODE
        assert await fetched(here) == PARTS
        await here.commit({"code/b@1": None})
        assert dict(await here.store.load()) == {"backend/b": b"record"}


@pytest.mark.parametrize("url", ["sqlite", "file"], indirect=True)
async def test_a_restart_keeps_a_parcel_under_another_name_also_after_the_scheduler(url: str) -> None:
    copied = {"code/b@2": b"label"}
    async with scheduler(url) as here:
        await deploy(here)
    async with scheduler(url) as here:
        here.parcels.without_rows(await here.store.load())
        with pytest.raises(BadRequestError, match="no longer has the constructor arguments of c@1"):
            await here.commit({"code/c@1": b"label"}, {"c@1": "ab" * 32})
        await here.commit(dict(copied), {"b@2": PARCEL.digest})
        await here.commit({"code/b@1": None})
        assert [bytes(each) for each in await ParcelCarrier(here.ask).fetch("b@2", PARCEL)] == list(PARTS)
    async with scheduler(url) as here:
        assert here.parcels.without_rows(await here.store.load()) == {**copied, "backend/b": b"record"}
        assert [bytes(each) for each in await ParcelCarrier(here.ask).fetch("b@2", PARCEL)] == list(PARTS)
        await here.commit({"code/b@2": None})
        assert dict(await here.store.load()) == {"backend/b": b"record"}


@pytest.mark.parametrize("url", ["sqlite", "file"], indirect=True)
async def test_a_parcel_is_rewritten_with_all_other_records(url: str) -> None:
    async with scheduler(url) as here:
        await deploy(here)
        rows = await here.parcels.all_rows({"b@1": PARCEL.digest})
        await here.store.rewrite(1, StoreChange({**CODE, **rows}))
    async with scheduler(url) as here:
        assert here.parcels.without_rows(await here.store.load()) == CODE
        assert await fetched(here) == PARTS


@pytest.mark.parametrize("is_shared", [True, False])
async def test_other_machines_carry_the_content_in_pieces(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if is_shared:
        monkeypatch.setattr(ParcelMemory, "opened", lambda *given: None)
    else:
        monkeypatch.setattr(parcel_memory, "HAS_SEGMENTS", False)
    async with scheduler() as here:
        await deploy(here)
        assert here.asked.count("add_to_parcel") == 2
        assert await fetched(here) == PARTS
        assert here.asked.count("read_parcel") == 2


@pytest.mark.skipif(not HAS_SEGMENTS, reason="this system has no anonymous files")
async def test_processes_of_one_machine_share_the_memory() -> None:
    async with scheduler() as here:
        await deploy(here)
        server_state = ParcelCarrier(here.ask)
        first = await server_state.fetch("b@1", PARCEL)
        second = await server_state.fetch("b@1", PARCEL)
        assert here.asked == ["offer_parcel", "offer_parcel", "find_parcel"]
        assert all(each.readonly for each in (*first, *second))
        assert len({each.obj for each in (*first, *second)}) == 1


async def test_a_known_parcel_is_not_sent_again() -> None:
    async with scheduler() as here:
        await deploy(here)
        here.asked.clear()
        await ParcelCarrier(here.ask).send(PARCEL, PARTS)
        assert here.asked == ["offer_parcel"]


async def test_content_that_two_codes_share_stays_for_the_other() -> None:
    async with scheduler() as here:
        await deploy(here)
        await here.commit({"code/c@1": b"label"}, {"c@1": PARCEL.digest})
        await here.commit({"code/b@1": None})
        parts = await ParcelCarrier(here.ask).fetch("c@1", PARCEL)
        assert tuple(map(bytes, parts)) == PARTS


async def test_a_parcel_whose_code_is_deleted_while_it_is_read_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scheduler() as here:
        await deploy(here)
        here.parcels = InstanceParcels(here.store)  # of the next scheduler
        here.parcels.without_rows(await here.store.load())
        begun, deleted = threading.Event(), threading.Event()
        join = module._join

        def slowly(pieces: Sequence[Any]) -> ParcelMemory:
            begun.set()
            deleted.wait(10)
            return join(pieces)

        monkeypatch.setattr(module, "_join", slowly)
        reading = asyncio.ensure_future(fetched(here))
        await asyncio.to_thread(begun.wait, 10)
        await here.commit({"code/b@1": None})
        deleted.set()
        await asyncio.wait({reading})
        assert not here.parcels._memory


async def test_an_instance_that_ends_drops_its_parcels() -> None:
    entry = Instance("i", None, False, 5.0, b"", MemoryStore())

    async def ask(verb: str, **message: Any) -> Any:
        return await parcel_verbs(lambda _: entry.parcels)[verb]("i", **message)

    await ParcelCarrier(ask).send(PARCEL, PARTS)
    assert entry.parcels._memory
    await close_records(entry)
    assert not entry.parcels._memory


async def test_a_parcel_whose_change_does_not_come_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    async with scheduler() as here:
        await ParcelCarrier(here.ask).send(PARCEL, PARTS)
        async with asyncio.timeout(10):
            while here.parcels._memory:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
        with pytest.raises(BadRequestError, match="deploy again"):
            await here.commit(dict(CODE), {"b@1": PARCEL.digest})
        with pytest.raises(CodeLoadError, match="lost"):
            await fetched(here)
        gc.collect()
