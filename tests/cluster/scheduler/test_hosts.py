"""Which workers the supervisor restarts, and which Hosts it releases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from tables import each_case

from daskserve.cluster.reserved_resources import ReservedResources
from daskserve.cluster.scheduler import hosts
from daskserve.cluster.scheduler.hosts import ANSWER_S, HostRegistry, _HostEntry
from daskserve.errors import ActorLostError, InstanceError, UnavailableError
from daskserve.testing import run_virtual

WORKER = "tcp://10.0.0.1:1"


class NannyScheduler:
    """A scheduler with one worker, whose restarts are recorded."""

    def __init__(self, *, nanny: str | None = "tcp://10.0.0.1:2") -> None:
        self.workers = {WORKER: SimpleNamespace(nanny=nanny)}
        self.connection_args: dict[str, Any] = {}
        self.restarted: list[str] = []

    async def restart_workers(self, workers: list[str], **options: Any) -> None:
        self.restarted += workers


async def restarted(
    monkeypatch: pytest.MonkeyPatch, answer: Any, *, has_network: bool = True, **options: Any
) -> list[str]:
    """Return the workers that are restarted when the only worker is to restart."""

    async def call_actor(*arguments: Any) -> Any:
        return await answer()

    async def connect(address: str) -> Any:
        assert address == "tcp://10.0.0.1:2"
        if not has_network:
            await asyncio.sleep(100)
        return SimpleNamespace(abort=lambda: None)

    monkeypatch.setattr(hosts, "call_actor", call_actor)
    monkeypatch.setattr(hosts, "connect_comm", connect)
    scheduler: Any = NannyScheduler(**options)
    registry = HostRegistry(scheduler, ReservedResources(scheduler, print))
    client: Any = object()
    registry.open(client)
    registry._entries[WORKER] = _HostEntry("key", future=client, is_open=True)
    await registry.restart(WORKER)
    await asyncio.sleep(0)
    return list(scheduler.restarted)


async def hangs() -> None:
    await asyncio.sleep(100)


async def is_gone() -> None:
    raise ActorLostError("gone")


async def answers() -> dict[str, Any]:
    return {"value": []}


@pytest.mark.virtual_time
@pytest.mark.parametrize("answer", [hangs, is_gone])
async def test_a_worker_that_does_not_answer_is_restarted(
    monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    assert await restarted(monkeypatch, answer) == [WORKER]
    assert asyncio.get_running_loop().time() <= ANSWER_S + 0.01


def test_a_late_order_does_not_restart_a_worker_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_virtual(lambda: restarted(monkeypatch, answers)) == []


def test_a_worker_without_a_nanny_cannot_be_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InstanceError, match="has no nanny"):
        run_virtual(lambda: restarted(monkeypatch, hangs, nanny=None))


def test_a_worker_without_network_is_not_restarted_when_the_network_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnavailableError, match="its nanny does not answer, either"):
        run_virtual(lambda: restarted(monkeypatch, hangs, has_network=False))


@each_case("end", [lambda registry: registry.end_instance("shop"), HostRegistry.close])
def test_a_host_that_closes_at_the_same_time_does_not_prevent_the_end(
    end: Callable[[HostRegistry], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker retires while the instance ends."""

    async def is_closing(*arguments: Any) -> Any:
        raise UnavailableError("The Host is not open.")

    monkeypatch.setattr(hosts, "call_actor", is_closing)
    scheduler: Any = NannyScheduler()
    scheduler.tasks, scheduler.workers = {}, {}
    registry = HostRegistry(scheduler, ReservedResources(scheduler, print))
    registry.open(SimpleNamespace())  # type: ignore[arg-type]
    future: Any = SimpleNamespace(status="finished", release=lambda: None)
    registry._entries[WORKER] = _HostEntry("key", future=future, is_open=True)
    run_virtual(lambda: end(registry))


@pytest.mark.virtual_time
async def test_a_worker_that_leaves_while_all_hosts_close_does_not_prevent_the_others() -> None:
    scheduler: Any = NannyScheduler()
    scheduler.tasks, scheduler.workers = {}, {}
    registry = HostRegistry(scheduler, ReservedResources(scheduler, print))
    released: list[str] = []
    future: Any = SimpleNamespace(status="pending", release=lambda: released.append("future"))
    registry._entries[WORKER] = _HostEntry("key", future=future)
    closing = asyncio.ensure_future(registry.close())
    await asyncio.sleep(0)
    registry.forget(WORKER)
    await closing
    assert released == ["future"]


GO = threading.Event()


def wait_to_go() -> None:
    GO.wait(50)


@asynccontextmanager
async def starting_host() -> AsyncIterator[tuple[Scheduler, Worker, HostRegistry, asyncio.Future[bool], Any]]:
    """Yield a worker whose only task thread is busy until `GO` is set, so its Host waits in the queue."""
    GO.clear()
    async with (
        Scheduler(protocol="inproc", dashboard_address="127.0.0.1:0", port=0) as scheduler,
        Worker(scheduler.address, nthreads=1) as worker,
        Worker(scheduler.address, nthreads=1),
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        busy = client.submit(wait_to_go, workers=[worker.address])
        registry = HostRegistry(scheduler, ReservedResources(scheduler, print))
        registry.open(client)
        admitting = asyncio.ensure_future(registry.admit(worker.address))
        while not scheduler.workers[worker.address].actors:  # noqa: ASYNC110 - Dask has no event
            await asyncio.sleep(0.001)
        yield scheduler, worker, registry, admitting, busy
        GO.set()
        await busy


@each_case("leave", [HostRegistry.release, lambda registry, worker: registry.close()])
def test_a_worker_can_be_retired_although_its_host_was_just_starting(
    leave: Callable[[HostRegistry, str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "PROBE_TIMEOUT_S", 50)  # on a busy machine

    async def main() -> None:
        async with starting_host() as (scheduler, worker, registry, admitting, busy):
            await leave(registry, worker.address)
            GO.set()
            await busy
            retired: Any = await scheduler.retire_workers([worker.address])
            assert set(retired) == {worker.address}
            assert admitting.cancelled()

    asyncio.run(asyncio.wait_for(main(), 50))


def test_a_worker_that_is_lost_while_its_host_starts_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "PROBE_TIMEOUT_S", 50)  # on a busy machine

    async def main() -> None:
        async with starting_host() as (_, worker, registry, admitting, _):
            registry.forget(worker.address)
            await asyncio.wait_for(asyncio.wait({admitting}), 10)
            assert admitting.cancelled()

    asyncio.run(asyncio.wait_for(main(), 50))
