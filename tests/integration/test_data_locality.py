"""Futures and collections of Dask as arguments and results of calls."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from clusters import nannied_cluster, pids
from dask_processes import ExternalCluster, poll_for
from distributed import get_client, get_worker

import daskserve as serve
from daskserve.errors import UnavailableError

LIMIT_S = 30


def total_of(handle: serve.Handle, number: int) -> float:
    """Make a future, and use it in a task."""
    future = handle.options(method_name="make", result="future").remote(number).result()
    return float(get_client().submit(np.sum, future).result())


class Model:
    def make(self, number: int) -> Any:
        if number < 0:
            raise ValueError("negative")
        return np.ones(number)

    def place(self, value: Any, *others: Any) -> tuple[str, bool]:
        worker = get_worker()
        held = dict(worker.data)
        return worker.address, any(each is value for each in held.values())

    def same(self, value: Any) -> Any:
        return value

    def read(self, value: Any) -> tuple[float, bool]:
        """Return the sum of an array, and whether it is in shared memory."""
        return float(value.sum()), not value.flags.writeable


def test_a_call_goes_to_its_data_and_takes_it_without_a_copy(
    client: serve.Client, external: ExternalCluster
) -> None:
    client.deploy("model", Model, config={"num_replicas": 2})
    handle, dask = client.get_handle("model"), external.client
    small = dask.scatter(np.ones(10), hash=False)
    for worker in [*dask.scheduler_info()["workers"]] * 2:
        large = dask.submit(np.ones, 1_000_000, workers=[worker], pure=False)
        assert handle.place.remote(large, small).result(LIMIT_S) == (worker, True)


def spill(dask_worker: Any, key: str) -> bool:
    """Let a worker spill all of its data; return whether the value is on its disk."""
    while dask_worker.data.fast and dask_worker.data.evict() != -1:
        pass
    return key in dask_worker.data.slow


def test_values_of_other_workers_come_through_shared_memory_or_from_their_disks(
    client: serve.Client, external: ExternalCluster
) -> None:
    client.deploy("model", Model)
    client.deploy("child", Model, config={"isolation": "process"})
    handle, child, dask = client.get_handle("model"), client.get_handle("child"), external.client
    here = handle.place.remote(1).result(LIMIT_S)[0]
    other = next(worker for worker in dask.scheduler_info()["workers"] if worker != here)
    numbers = dask.submit(np.arange, 300_000.0, workers=[other], pure=False)
    expected = 299_999 * 150_000.0
    assert handle.read.remote(numbers).result(LIMIT_S) == (expected, True)
    assert child.read.remote(numbers).result(LIMIT_S) == (expected, True)
    assert dask.run(spill, key=numbers.key, workers=[other]) == {other: True}
    assert handle.read.remote(numbers).result(LIMIT_S)[0] == expected


class Caller:
    def __init__(self, model: serve.Handle) -> None:
        self.model = model

    async def __call__(self, number: int) -> list[Any]:
        future = await self.model.options(method_name="make", result="future").remote(number)
        assert future.client is get_client()
        sums = [await get_client().submit(np.sum, future), (await future).sum()]
        return [*map(float, sums), (await self.model.place.remote(future))[1]]

    def plain(self, number: int) -> float:
        return total_of(self.model, number)


def test_results_stay_on_the_cluster_as_futures(client: serve.Client, external: ExternalCluster) -> None:
    client.deploy("model", Model, config={"num_replicas": 2})
    handle, dask = client.get_handle("model"), external.client
    for place in ("thread", "process"):
        client.deploy(f"caller_{place}", Caller, handle, config={"isolation": place})
    for number in (10, 1_000_000):
        future = handle.options(method_name="make", result="future").remote(number).result(LIMIT_S)
        assert future.result(LIMIT_S).sum() == dask.submit(np.sum, future).result(LIMIT_S) == number
        assert handle.place.remote(future).result(LIMIT_S)[1]
        for place in ("thread", "process"):
            caller = client.get_handle(f"caller_{place}")
            assert caller.remote(number).result(LIMIT_S) == [number, number, True]
            assert caller.plain.remote(number).result(LIMIT_S) == number
        key = future.key
        del future
        poll_for(lambda key=key: not dask.who_has([key]).get(key), what="the value is released")
    with pytest.raises(ValueError, match="negative"):
        handle.options(method_name="make", result="future").remote(-1).result(LIMIT_S)


class Held:
    """A value that is sent once a file exists."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def __reduce__(self) -> Any:
        (self.folder / "asked").touch()
        poll_for((self.folder / "sent").exists, what="the test lets values go")
        return int, (self.number,)


def test_a_cancelled_call_leaves_the_values_of_others_alone(
    client: serve.Client, external: ExternalCluster, tmp_path: Path
) -> None:
    client.deploy("model", Model)
    handle, dask = client.get_handle("model"), external.client
    here = handle.place.remote(1).result(LIMIT_S)[0]
    other = next(worker for worker in dask.scheduler_info()["workers"] if worker != here)
    values = [dask.submit(Held, tmp_path, each, workers=[other], pure=False) for each in range(8)]
    calls = [handle.same.remote(each) for each in values]
    poll_for((tmp_path / "asked").exists, what="the first value is fetched")
    calls.pop(5).cancel()
    assert handle.same.remote(0).result(LIMIT_S) == 0  # so the cancellation has arrived, too
    (tmp_path / "sent").touch()
    assert [each.result(LIMIT_S) for each in calls] == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.nightly
def test_lost_values_are_computed_again_or_fail_the_call() -> None:
    with nannied_cluster() as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        client.deploy("model", Model)
        handle, processes = client.get_handle("model"), pids(dask)
        here = handle.place.remote(1).result(LIMIT_S)[0]
        first, second = (worker for worker in processes if worker != here)
        computed = dask.submit(np.ones, 1_000_000, workers=[first], allow_other_workers=True)
        scattered = dask.scatter(np.ones(1_000_000), workers=[second], hash=False)
        assert computed.exception() is scattered.exception() is None  # both exist
        os.kill(processes[first], signal.SIGKILL)
        assert handle.place.remote(computed).result(LIMIT_S)[0] == here
        os.kill(processes[second], signal.SIGKILL)
        with pytest.raises((UnavailableError, CancelledError), match=r"lost|cancelled"):
            handle.place.remote(scattered).result(LIMIT_S)


def test_the_guide_to_a_feature_that_requests_use(
    client: serve.Client, external: ExternalCluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parent.parent.parent / "docs/data_locality.md"
    program, *_, feature, application, first, again = re.findall(
        r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    monkeypatch.setattr(serve, "run", client.run)
    names: dict[str, Any] = {"__name__": "guide", "dask": external.client}
    for block in (program, feature, application, first):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    answer = httpx.get(f"{url}/wines?row=7", timeout=LIMIT_S).json()
    assert len(answer) == len({*answer} - {7}) == 3
    old = external.client.get_dataset("wine-features").key
    names["wine_features"] = lambda: np.array([[9.0], [5.0], [8.0], [0.0], [7.0]])
    exec(again, names)
    assert httpx.get(f"{url}/wines?row=0", timeout=LIMIT_S).json() == [2, 4, 1]
    poll_for(lambda: not external.client.who_has([old]).get(old), what="the old table is released")
    external.client.unpublish_dataset("wine-features")
