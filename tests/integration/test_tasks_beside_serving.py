"""Dask tasks that replicas submit: their priority, their end with the request, and where they run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import httpx
import pytest
from dask_processes import ExternalCluster, poll_for
from distributed import Client, get_client, get_worker

import daskserve as serve

LIMIT_S = 20


def slow(_: Any) -> None:
    time.sleep(0.5)


def place(_: Any) -> str:
    time.sleep(0.01)
    return str(get_worker().address)


class Busy:
    """Submits many more tasks than the cluster has threads."""

    def __init__(self) -> None:
        self.outcome = ""

    def __call__(self, request: Any = None) -> Any:
        try:
            return dask.compute(*[dask.delayed(slow)(number, pure=False) for number in range(100)])
        except BaseException as error:
            self.outcome = type(error).__name__
            raise

    async def awaits(self) -> None:
        client = get_client()
        await client.gather(client.map(slow, range(100), pure=False))

    def seen(self) -> str:
        return self.outcome

    def where(self) -> str:
        return str(get_worker().address)

    def priorities(self) -> list[int]:
        """Return the priorities of tasks that are set by the option, by the call and by an annotation."""
        client: Any = get_client()
        tasks = [client.submit(abs, -1, pure=False), client.submit(abs, -1, pure=False, priority=7)]
        with dask.annotate(priority=0):
            tasks.append(client.submit(abs, -1, pure=False))
        tasks.append(dask.delayed(abs)(-1, pure=False).persist())
        keys = [str(each.key) for each in tasks]
        client.gather(tasks[:3])

        def look(dask_scheduler: Any) -> list[int]:
            return [-dask_scheduler.tasks[key].priority[0] for key in keys]

        found: list[int] = client.run_on_scheduler(look)
        return found


def slow_tasks(client: Client) -> int:
    """Return the number of these tasks that the scheduler knows."""

    def count(dask_scheduler: Any) -> int:
        return sum("slow" in str(key) for key in dask_scheduler.tasks)

    found: int = client.run_on_scheduler(count)
    return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_tasks_of_a_request_have_a_low_priority_and_end_with_it(
    isolation: str, client: serve.Client, external: ExternalCluster, url: str
) -> None:
    config: dict[str, Any] = {"isolation": isolation, "dask_task_config": {"priority": -3}}
    client.deploy("busy", Busy, config=config, route_prefix="/busy")
    busy: Any = client.get_handle("busy")
    assert busy.priorities.remote().result(LIMIT_S) == [-3, 7, 0, -3]

    def cancelled() -> None:
        response = busy.remote()
        poll_for(lambda: slow_tasks(external.client) == 100)
        response.cancel()

    def awaited() -> None:
        response = busy.awaits.remote()
        poll_for(lambda: slow_tasks(external.client) == 100)
        response.cancel()

    def late() -> None:
        with pytest.raises(serve.errors.RequestTimeoutError):
            busy.options(timeout_s=1).remote().result(LIMIT_S)

    def disconnected() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/busy", timeout=httpx.Timeout(LIMIT_S, read=1))

    ends: list[Callable[[], None]] = [cancelled, awaited, late, disconnected]
    for end in ends:
        end()
        # The running tasks take half a second; all tasks would take 12 seconds on two workers.
        poll_for(lambda: not slow_tasks(external.client), 3, what=end.__name__)
    assert busy.seen.remote().result(LIMIT_S) in ("FutureCancelledError", "CancelledError")


def test_tasks_go_where_no_replica_has_the_threads(client: serve.Client, external: ExternalCluster) -> None:
    def places() -> set[str]:
        tasks = external.client.map(place, range(40), pure=False)
        return set(external.client.gather(tasks))

    def threads() -> dict[str, int]:
        found: dict[str, int] = external.client.nthreads()
        return found

    client.deploy("busy", Busy, actor_options={"num_cpus": 2}, route_prefix=None)
    there = client.get_handle("busy").where.remote().result(LIMIT_S)
    (other,) = threads().keys() - {there}
    poll_for(lambda: threads() == {there: 1, other: 2}, what=threads)
    assert places() == {other}
    client.delete_deployment("busy")
    poll_for(lambda: threads() == {there: 2, other: 2}, what=threads)
    assert places() == {there, other}


def test_the_example_of_the_guide_works(client: serve.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/tasks_beside_serving.md").read_text(encoding="utf-8")
    monkeypatch.setattr(serve, "run", lambda app, **options: client.run(app, **options))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/tasks_beside_serving.md", "exec", dont_inherit=True), names)
