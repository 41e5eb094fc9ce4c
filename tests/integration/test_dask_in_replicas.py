"""Dask's own functions in user code, on every event loop, in threads and in child processes."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import dask
import dask.array
import pytest
from dask_processes import ExternalCluster, poll_for
from distributed import get_client, get_worker

import daskserve as serve

LIMIT_S = 20
PLACES: dict[str, dict[str, Any]] = {
    "own": {},
    "worker": {"event_loop": "worker"},
    "process": {"isolation": "process"},
    "process_worker": {"isolation": "process", "event_loop": "worker"},
}


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
        return [worker.address, worker.name, worker.scheduler.address]

    def workers_plugins(self) -> Any:
        return list(get_worker().plugins)


@pytest.fixture(params=PLACES)
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
    """Returns what arrives, and the process that fetched it."""

    def __call__(self, request: Any) -> Any: ...

    async def see(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def total(self, array: Any) -> Any:
        return float(array.sum())


class Composed:
    """Passes values of its own client on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __call__(self, request: Any) -> Any: ...

    async def pass_on(self) -> Any:
        return await self.inner.see.remote(get_client().submit(abs, -7), [dask.delayed(abs)(-8)])

    def pass_on_plain(self) -> Any:
        return self.inner.see.remote(get_client().submit(abs, -9)).result()


def slow_double(value: int) -> int:
    time.sleep(0.2)
    return 2 * value


@pytest.mark.parametrize("place", ["own", "worker", "process"])
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
