"""Instances come back when their workers register with the next scheduler."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.reconnect import (
    ASKED_S,
    KNOWN_S,
    UNKNOWN_S,
    KnownInstance,
    ReconnectingInstances,
    restore,
)
from daskserve.cluster.store.opening import MemoryStore, open_store
from daskserve.errors import InstanceError, UnavailableError
from daskserve.loops.tasks import TaskSet
from daskserve.testing import run_virtual

LOST = {"instance": "a", "store": "sqlite:///a.db", "timeout_s": 60.0}
RECORDS = {"backend/b": b"..."}
OWNED = {"owner": None, "owns_cluster": False, "grace_s": 0.0, "payload": b""}


class NextScheduler:
    """A scheduler that has just started, and the actions of its supervisor."""

    def __init__(self, *workers: str) -> None:
        self.workers = dict.fromkeys(workers)
        self.clients: dict[str, Any] = {}
        self.instances: dict[str, Any] = {}
        self.started: list[tuple[float, dict[str, Any]]] = []
        self.ends: list[str] = []
        self.fails = False
        #: After each attempt to start an instance, whether the supervisor has none.
        self.unused: list[bool] = []
        self.owner: str | None = None
        scheduler: Any = self
        self.reconnects = ReconnectingInstances(
            scheduler,
            self.instances,
            self._start,
            lambda entry, delay_s: self.ends.append(entry.name),
            TaskSet(logging.getLogger()).spawn,
            lambda: self.unused.append(not self.reconnects.are_pending and not self.instances),
        )

    async def _start(self, back: KnownInstance, **message: Any) -> None:
        if self.fails:
            raise InstanceError("no")
        known = {"epoch": back.epoch, "records": back.records}
        self.started.append((asyncio.get_running_loop().time(), {**message, **known}))
        self.instances["a"] = SimpleNamespace(name="a", owner=self.owner, grace_s=5.0, controller="there")


@pytest.mark.virtual_time
async def test_an_instance_starts_once_all_known_workers_are_back() -> None:
    scheduler = NextScheduler("w1")
    ask = scheduler.reconnects.bring_back
    assert not await ask(LOST, "w1", workers=["w1", "w2"], epoch=7, records=RECORDS)
    assert scheduler.reconnects.are_pending
    await asyncio.sleep(UNKNOWN_S + 0.5)
    assert scheduler.started == []
    scheduler.workers["w2"] = None
    await asyncio.sleep(0.1)
    ((_, message),) = scheduler.started
    assert message == {**LOST, "epoch": 7, "records": RECORDS}
    assert await ask(LOST, "w2")
    assert not scheduler.reconnects.are_pending


@pytest.mark.virtual_time
async def test_an_instance_does_not_wait_long_for_lost_workers() -> None:
    scheduler = NextScheduler("w1")
    await scheduler.reconnects.bring_back(LOST, "w1", workers=["w1", "w2"], epoch=7, records=RECORDS)
    await asyncio.sleep(KNOWN_S + 1)
    assert KNOWN_S <= scheduler.started[0][0] <= KNOWN_S + 0.1


@pytest.mark.virtual_time
async def test_without_a_controller_an_instance_waits_for_workers_that_may_follow() -> None:
    scheduler = NextScheduler("w1")
    await scheduler.reconnects.bring_back(LOST, "w1")
    await asyncio.sleep(UNKNOWN_S + 1)
    assert UNKNOWN_S <= scheduler.started[0][0] <= UNKNOWN_S + 0.1


@pytest.mark.virtual_time
async def test_an_instance_whose_workers_are_all_replaced_waits_for_one() -> None:
    scheduler = NextScheduler()
    await scheduler.reconnects.bring_back(LOST, "w1", workers=["w1"], epoch=7, records=RECORDS)
    await asyncio.sleep(30)
    assert scheduler.started == []
    scheduler.workers["new"] = None
    await asyncio.sleep(0.1)
    assert len(scheduler.started) == 1


@pytest.mark.virtual_time
async def test_records_in_memory_come_from_the_worker_with_the_controller_only() -> None:
    scheduler = NextScheduler("w1", "w2")
    in_memory = {**LOST, "store": "memory://"}
    assert not await scheduler.reconnects.bring_back(in_memory, "w1")
    await asyncio.sleep(10)
    assert scheduler.started == []
    await scheduler.reconnects.bring_back(in_memory, "w2", workers=["w1", "w2"], epoch=3, records=RECORDS)
    await asyncio.sleep(0.1)
    assert scheduler.started[0][1]["records"] == RECORDS


@pytest.mark.virtual_time
async def test_the_next_scheduler_uses_the_records_of_the_newest_controller() -> None:
    scheduler = NextScheduler("w1", "w2")
    ask = scheduler.reconnects.bring_back
    await ask(LOST, "w1", workers=["w1", "w2", "w3"], epoch=8, records=RECORDS)
    await ask(LOST, "w2", workers=["w1", "w2"], epoch=7, records={"backend/b": b"older"})
    await ask(LOST, "w3", epoch=6)
    await asyncio.sleep(KNOWN_S + 1)
    assert scheduler.started[0][1] == {**LOST, "epoch": 8, "records": RECORDS}


@pytest.mark.parametrize("url", ["memory://", "sqlite"])
async def test_a_store_that_was_lost_with_the_scheduler_gets_the_records_of_the_last_controller(
    url: str, tmp_path: Path
) -> None:
    place = f"sqlite:///{tmp_path}/store.db" if url == "sqlite" else url
    entry = Instance.started_by({**LOST, **OWNED}, open_store(place, "a"))
    await entry.store.open()
    try:
        await restore(entry, place, 7, RECORDS)
        assert await entry.store.load() == RECORDS
        await entry.store.commit(9, StoreChange({"backend/b": b"newer"}))
        await restore(entry, place, 7, RECORDS)
        assert await entry.store.load() == {"backend/b": b"newer"}
        # Actors of a later epoch remain, and their records are lost.
        await restore(entry, place, 12, None)
        assert await entry.store.claim_epoch() == 13
    finally:
        await entry.store.close()


@pytest.mark.virtual_time
async def test_a_start_that_fails_is_tried_again_when_a_worker_asks_again() -> None:
    scheduler = NextScheduler("w1")
    scheduler.fails = True
    await scheduler.reconnects.bring_back(LOST, "w1", workers=["w1"], epoch=7, records=RECORDS)
    await asyncio.sleep(0.1)
    assert scheduler.unused == [False], "a worker is expected to ask again"
    assert scheduler.reconnects.are_pending
    with pytest.raises(UnavailableError, match="'a' serves, but cannot be changed: no"):
        scheduler.reconnects.check("a")
    await asyncio.sleep(ASKED_S)
    scheduler.reconnects.check("a")
    assert not scheduler.reconnects.are_pending, "the supervisor unregisters unless a worker asks again"
    scheduler.fails = False
    assert not await scheduler.reconnects.bring_back(LOST, "w1", workers=["w1"], epoch=7, records=RECORDS)
    await asyncio.sleep(0.1)
    assert len(scheduler.started) == 1
    scheduler.reconnects.check("a")


@pytest.mark.virtual_time
async def test_workers_need_not_ask_for_an_instance_whose_controller_waits_for_the_store() -> None:
    scheduler = NextScheduler("w1")
    scheduler.instances["a"] = entry = Instance.started_by({"instance": "a", **OWNED}, MemoryStore())
    assert not await scheduler.reconnects.bring_back(LOST, "w1"), "it begins"
    entry.has_begun.set()
    assert await scheduler.reconnects.bring_back(LOST, "w1")


@pytest.mark.virtual_time
async def test_the_reason_of_failed_starts_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = NextScheduler("w1")
    scheduler.fails = True
    for _ in range(5):
        await scheduler.reconnects.bring_back(LOST, "w1", workers=["w1"], epoch=7, records=RECORDS)
        await asyncio.sleep(0.5)
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 2


def test_an_instance_whose_owner_does_not_come_back_ends() -> None:
    async def main(owner: str | None, clients: list[str]) -> list[str]:
        scheduler = NextScheduler("w1")
        scheduler.owner = owner
        scheduler.clients = dict.fromkeys(clients)
        await scheduler.reconnects.bring_back(LOST, "w1", workers=["w1"], epoch=7, records=RECORDS)
        await asyncio.sleep(0.1)
        return scheduler.ends

    assert run_virtual(main, "program", []) == ["a"]
    assert run_virtual(main, "program", ["program"]) == []
    assert run_virtual(main, None, []) == []
