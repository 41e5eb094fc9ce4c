"""Dask's own functions in user code, on every event loop, in threads and in child processes."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array
import pytest
from dask_processes import ExternalCluster, poll_for
from distributed import (
    Client,
    Event,
    Lock,
    MultiLock,
    Queue,
    Semaphore,
    Variable,
    as_completed,
    fire_and_forget,
    get_client,
    get_worker,
    secede,
    wait,
    worker_client,
)

import daskserve as serve

LIMIT_S = 20
PLACES: dict[str, dict[str, Any]] = {
    "own": {},
    "worker": {"event_loop": "worker"},
    "process": {"isolation": "process"},
    "process_worker": {"isolation": "process", "event_loop": "worker"},
}
EACH_PLACE = [
    pytest.param(each, marks=[pytest.mark.nightly] if each.endswith("worker") else []) for each in PLACES
]


class Dask:
    """Uses Dask in every way that user code may."""

    def __call__(self, request: Any) -> None: ...

    async def first(self) -> Any:
        """Use the client before it is connected."""
        data = await get_client().scatter([1, 2, 3])
        return await get_client().submit(sum, data)

    async def gathered(self) -> Any:
        client = get_client()
        assert client is get_client()
        return await client.gather(client.map(abs, [-1, -2]))

    async def failing(self) -> Any:
        return await get_client().submit(divmod, 1, 0)

    async def in_thread(self) -> Any:
        return await asyncio.to_thread(lambda: get_client().submit(abs, -5).result())

    def plain(self) -> Any:
        client = get_client()
        return [client.submit(abs, -1).result(), client.gather(client.map(abs, [-2]))]

    def loop_of_its_own(self) -> Any:
        async def main() -> Any:
            return await get_client().submit(abs, -6)

        return asyncio.run(main())

    def worker(self) -> Any:
        worker = get_worker()
        assert isinstance(Client.current(), Client)
        return [worker.address, worker.name, worker.scheduler.address]

    def workers_plugins(self) -> Any:
        return list(get_worker().plugins)


# ---- locks and the like


def slow_double(value: int) -> int:
    time.sleep(0.2)
    return 2 * value


class Counter:
    """An actor."""

    number = 0

    def add(self, step: int) -> int:
        self.number += step
        return self.number


def shared(name: str) -> dict[str, Any]:
    """Create one of each of Dask's objects for coordination between workers."""
    return {
        "lock": Lock(f"{name}-lock"),
        "semaphore": Semaphore(1, f"{name}-semaphore"),
        "multi": MultiLock([f"{name}-a", f"{name}-b"]),
        "event": Event(f"{name}-event"),
        "queue": Queue(f"{name}-queue"),
        "variable": Variable(f"{name}-variable"),
    }


async def coordinate(means: dict[str, Any]) -> None:
    """Use them on an event loop."""
    lock, semaphore, event, queue = (means[each] for each in ("lock", "semaphore", "event", "queue"))
    async with lock, semaphore, means["multi"]:
        assert await lock.locked()
        assert not await Semaphore(1, semaphore.name).acquire(timeout=0.01)
    assert not await lock.locked()
    await event.set()
    assert await event.wait(5)
    await event.clear()
    await queue.put(get_client().submit(abs, -3))
    assert await (await queue.get(timeout=5)) == 3
    await means["variable"].set(4)
    assert await means["variable"].get(timeout=5) == 4


def coordinate_in_thread(means: dict[str, Any]) -> None:
    """Use them in plain code."""
    lock, semaphore, event, queue = (means[each] for each in ("lock", "semaphore", "event", "queue"))
    with lock, semaphore, means["multi"]:
        assert lock.locked()
        assert not Semaphore(1, semaphore.name).acquire(timeout=0.01)
    assert not lock.locked()
    event.set()
    assert event.wait(5)
    event.clear()
    queue.put(get_client().submit(abs, -3))
    assert queue.get(timeout=5).result() == 3
    means["variable"].set(4)
    assert means["variable"].get(timeout=5) == 4


class Coordinates:
    """Uses Dask's locks and similar objects, wherever they were created."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.known = [given, shared("made")]

    def __call__(self, request: Any) -> None: ...

    async def coordinate(self, passed: dict[str, Any]) -> None:
        of_thread = await asyncio.to_thread(shared, "thread")
        for means in [*self.known, passed, shared("here"), of_thread]:
            await coordinate(means)

    def coordinate_plain(self, passed: dict[str, Any]) -> None:
        for means in [*self.known, passed, shared("here")]:
            coordinate_in_thread(means)
        asyncio.run(coordinate(shared("loop")))

    async def wait(self) -> Any:
        client = get_client()
        futures = client.map(abs, [-1, -2])
        assert len((await wait(futures)).done) == 2
        found = [await future async for future in as_completed(futures)]
        foreign = await asyncio.to_thread(lambda: get_client().submit(abs, -3))
        await wait([foreign])
        if foreign.client is not client:  # the worker's loop has the client of threads
            with pytest.raises(serve.errors.BlockingCallError, match="belongs to the Dask client of another"):
                as_completed([foreign])
        fire_and_forget(Client.current().submit(slow_double, 5, pure=False))
        actor: Any = await client.submit(Counter, actor=True)
        with worker_client() as same:
            assert same is client
        return [*sorted(found), await foreign, await actor.add(4), await actor.number]

    def wait_plain(self) -> Any:
        client = get_client()
        futures = client.map(abs, [-1, -2])
        assert len(wait(futures).done) == 2
        found = [future.result() for future in as_completed(futures)]
        fire_and_forget(Client.current().submit(slow_double, 5, pure=False))
        actor: Any = client.submit(Counter, actor=True).result()
        with worker_client() as same:
            assert same is client
        total = dask.array.ones(3, chunks=1).sum().compute()
        return [*sorted(found), int(total), actor.add(4).result(), actor.number]

    async def future(self) -> Any:
        return get_client().submit(abs, -6)

    def future_plain(self) -> Any:
        return get_client().submit(abs, -7)

    async def enter(self, kind: str) -> None:
        with shared("entered")[kind]:
            raise AssertionError("entered without a lock")

    async def give_up(self, kind: str) -> bool:
        """Stop waiting for a lock; return whether it can be acquired later."""
        async with shared("given-up")[kind]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await shared("given-up")[kind].acquire()
        async with asyncio.timeout(5):
            async with shared("given-up")[kind]:
                return True

    def leave_dasks_threads(self) -> None:
        secede()

    async def compute(self) -> None:
        dask.array.ones(3, chunks=1).sum().compute()

    def ask_elsewhere(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: Event("elsewhere").set()).result()

    def keep_from_ended_loop(self) -> None:
        async def make() -> Any:
            event = Event("ended")
            await event.set()
            return event

        asyncio.run(make()).clear()

    async def leftovers(self) -> int:
        """Return how many locks are alive after some have been used."""
        for _ in range(5):
            async with Lock("leftover"):
                pass
        gc.collect()
        return sum(type(each) is Lock and each.name == "leftover" for each in gc.get_objects())


@pytest.fixture(params=EACH_PLACE)
def coordinating(
    request: pytest.FixtureRequest, client: serve.Client, external: ExternalCluster
) -> Iterator[Any]:
    with external.client.as_current():
        client.deploy("means", Coordinates, shared("given"), config=PLACES[request.param], route_prefix=None)
    yield client.get_handle("means")
    client.delete_deployment("means")


#: The advice in the errors of methods.
RULES = {
    "leave_dasks_threads": "remove secede()",
    "compute": "await get_client().compute(x)",
    "ask_elsewhere": "contextvars.copy_context().run",
    "keep_from_ended_loop": "created on an event loop that has ended",
}


@pytest.mark.smoke
def test_dasks_locks_and_the_like_work_wherever_they_were_made(
    coordinating: Any, external: ExternalCluster, request: pytest.FixtureRequest
) -> None:
    def call(method: str, *args: Any) -> Any:
        return getattr(coordinating, method).remote(*args).result(LIMIT_S)

    with external.client.as_current():
        call("coordinate", shared("passed"))
        call("coordinate_plain", shared("passed"))
    assert call("wait") == [1, 2, 3, 4, 4]
    assert call("wait_plain") == [1, 2, 3, 4, 4]
    assert [call("future"), call("future_plain")] == [6, 7]
    for kind in "lock", "semaphore", "multi":
        with pytest.raises(serve.errors.BlockingCallError, match=r"write `async with \w+\(\.\.\.\)`"):
            call("enter", kind)
        assert call("give_up", kind)
    assert call("leftovers") == 0
    in_own_process = "process" in request.node.callspec.params["coordinating"]
    for method, note in RULES.items():
        if method != "ask_elsewhere" or not in_own_process:
            with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError)) as caught:
                call(method)
            assert any(note in each for each in caught.value.__notes__), method


@pytest.fixture(params=EACH_PLACE)
def handle(request: pytest.FixtureRequest, client: serve.Client) -> Iterator[Any]:
    client.deploy("dask", Dask, config=PLACES[request.param], route_prefix=None)
    yield client.get_handle("dask")
    client.delete_deployment("dask")


def test_dask_works_in_user_code(handle: Any, external: ExternalCluster, request: Any) -> None:
    def call(method: str) -> Any:
        return getattr(handle, method).remote().result(LIMIT_S)

    assert call("first") == 6
    assert call("gathered") == [1, 2]
    with pytest.raises(ZeroDivisionError):
        call("failing")
    assert call("in_thread") == 5
    assert call("plain") == [1, [2]]
    assert call("loop_of_its_own") == 6
    address, name, scheduler = call("worker")
    info = external.client.scheduler_info(n_workers=-1)
    assert (info["workers"][address]["name"], info["address"]) == (name, scheduler)
    if "process" in request.node.callspec.params["handle"]:
        with pytest.raises(AttributeError, match="has no 'plugins'; it has address, id, local_directory"):
            call("workers_plugins")
    else:
        assert call("workers_plugins")


def test_the_clients_of_user_code_end_with_the_replica(
    handle: Any, client: serve.Client, external: ExternalCluster
) -> None:
    assert handle.gathered.remote().result(LIMIT_S) == [1, 2]
    client.delete_deployment("dask")

    def user_clients() -> list[str]:
        names: Any = external.client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients))
        return [name for name in names if "daskserve-user" in name]

    poll_for(lambda: not user_clients(), what=user_clients)


def test_the_example_of_placement_groups_runs_its_task_in_the_other_bundle(
    client: serve.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs/deployments.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"### Placement groups\n.*?```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(serve, "run", lambda app: client.run(app, route_prefix=None))
    exec(compile(example, "docs/deployments.md", "exec", dont_inherit=True), {"__name__": "__main__"})


# ---- values as arguments


class Sees:
    """Returns its argument, and the id of the process that fetched it."""

    def __call__(self, request: Any) -> Any: ...

    async def see(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def total(self, array: Any) -> Any:
        return float(array.sum())


class Composed:
    """Passes on values of its own client."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __call__(self, request: Any) -> Any: ...

    async def pass_on(self) -> Any:
        return await self.inner.see.remote(get_client().submit(abs, -7), [dask.delayed(abs)(-8)])

    def pass_on_plain(self) -> Any:
        return self.inner.see.remote(get_client().submit(abs, -9)).result()


@pytest.mark.parametrize(
    "place", ["worker", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("own", "process"))]
)
def test_futures_and_collections_arrive_as_values(
    place: str, client: serve.Client, external: ExternalCluster
) -> None:
    client.deploy("sees", Sees, config=PLACES[place], route_prefix=None)
    sees = client.get_handle("sees")
    client.deploy("composed", Composed, sees, config=PLACES[place], route_prefix=None)
    composed = client.get_handle("composed")
    submit = external.client.submit

    # The only reference to the future is that of the call.
    assert sees.see.remote(submit(slow_double, 4, pure=False)).result(LIMIT_S) == ((8,), {})
    nested = sees.see.remote([submit(abs, -1)], {"a": (submit(abs, -2), 3)}, x=dask.delayed(abs)(-4))
    assert nested.result(LIMIT_S) == (([1], {"a": (2, 3)}), {"x": 4})
    assert sees.total.remote(dask.array.ones(50_000, chunks=25_000)).result(LIMIT_S) == 50_000
    assert composed.pass_on.remote().result(LIMIT_S) == ((7, [8]), {})
    assert composed.pass_on_plain.remote().result(LIMIT_S) == ((9,), {})
    with pytest.raises(ZeroDivisionError):
        sees.see.remote(submit(divmod, 1, 0)).result(LIMIT_S)
    cancelled = submit(slow_double, 5, pure=False)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        sees.see.remote(cancelled).result(LIMIT_S)
    del cancelled

    def tasks() -> list[str]:
        names: Any = external.client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
        return [name for name in names if str(name).startswith(("slow_double", "abs", "divmod"))]

    poll_for(lambda: gc.collect() is not None and not tasks(), what=tasks)
