"""Dask tasks of user code: their default priority, and their end with their request."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import dask
from tables import each_case

from daskserve.cluster.worker.request_tasks import RequestTasks, default_priority, end_with_request
from daskserve.context import RankHolder, ReplicaContext, RequestContext, current_replica, current_request


class FakeFuture:
    """A future of Dask's, as far as this module uses it."""

    def __init__(self, *, is_done: bool = False) -> None:
        self._is_done = is_done
        self.is_released = False

    def done(self) -> bool:
        return self._is_done

    def release(self) -> None:
        self.is_released = True


def in_replica(function: Callable[[], Any], request: RequestContext | None = None, **config: Any) -> Any:
    """Run code as in a replica."""

    def run() -> Any:
        holder = RankHolder(dask_task_config={"priority": -1, "cancel_with_request": True, **config})
        current_replica.set(ReplicaContext("instance", "backend", "backend#1", holder=holder))
        current_request.set(request)
        return function()

    return contextvars.copy_context().run(run)


def test_the_priority_is_that_of_the_deployment_unless_an_annotation_names_one() -> None:
    def annotated() -> int:
        with dask.annotate(priority=5):
            return default_priority()

    assert default_priority() == 0, "outside of replicas"
    assert in_replica(default_priority) == -1
    assert in_replica(default_priority, priority=-7) == -7
    assert in_replica(annotated) == 0, "Dask then takes that of the annotation"


def test_a_cancelled_request_releases_its_unfinished_futures() -> None:
    request, other = RequestContext(), RequestContext()
    futures: list[Any] = [FakeFuture(), FakeFuture(is_done=True), FakeFuture()]
    in_replica(lambda: end_with_request(futures[:2]), request)
    in_replica(lambda: end_with_request(futures[2:]), other)
    request.cancel_calls()
    assert [each.is_released for each in futures] == [True, False, False]
    later: Any = FakeFuture()
    in_replica(lambda: end_with_request([later]), request)
    assert later.is_released, "a plain function cannot be stopped, so what it submits later ends at once"


async def test_async_code_may_submit_tasks_to_clean_up() -> None:
    request, later = RequestContext(), FakeFuture()
    request.cancel_calls()
    in_replica(lambda: end_with_request([later]), request)  # type: ignore[list-item]
    assert not later.is_released


@each_case(("request_", "config"), [(None, {}), (RequestContext(), {"cancel_with_request": False})])
def test_tasks_may_outlive_their_request(request_: RequestContext | None, config: dict[str, Any]) -> None:
    future: Any = FakeFuture()
    in_replica(lambda: end_with_request([future]), request_, **config)
    if request_ is not None:
        request_.cancel_calls()
    assert not future.is_released


def test_futures_are_not_kept_alive() -> None:
    tasks = RequestTasks()
    tasks.add([FakeFuture() for _ in range(1000)])  # type: ignore[misc]
    assert not tasks._futures
    tasks.cancel()
