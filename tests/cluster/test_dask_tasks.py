"""The watch over the Dask tasks of a worker that make calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tables import each_case

from daskserve.cluster.dask import tasks
from daskserve.cluster.dask.tasks import DaskTask, TaskWatch
from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.data.caller.blocking import BRIEF_S, TaskSlot, wait_in_thread
from daskserve.errors import RequestCancelledError


class FakeWorker:
    """A worker with tasks that the test makes up; events of tasks on its loop are dropped."""

    def __init__(self) -> None:
        self.plugins: dict[str, Any] = {}
        self.state = SimpleNamespace(tasks={}, ready=Ready())
        self.loop = SimpleNamespace(add_callback=lambda function: function())

    def handle_stimulus(self, event: Any) -> None: ...

    def task(self, key: str, generation: int = 1) -> DaskTask:
        self.state.tasks[key] = SimpleNamespace(priority=(0, generation, 0))
        return DaskTask(self, key, is_in_thread=False)

    @property
    def watch(self) -> TaskWatch:
        found: TaskWatch = self.plugins["daskserve-calls"]
        return found


def no_limit() -> None:
    return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(tasks, "stopwatch", lambda: now[0])
    return now


def test_a_task_that_ends_while_it_is_away_is_forgotten() -> None:
    worker = FakeWorker()
    for key, finish in (("left", "memory"), ("failed", "error"), ("gone", "released")):
        task = worker.task(key)
        task.on_release(lambda: None)
        assert task.secede()
        watch = worker.watch
        watch.transition(key, "executing", "long-running")
        assert key in watch.away
        watch.transition(key, "long-running", finish)
        assert not watch.away
        assert not watch.callbacks


def test_the_watch_is_on_the_worker_as_long_as_tasks_call() -> None:
    worker = FakeWorker()
    for _ in range(2):
        for key in ("a", "b"):
            worker.task(key)
        watch = worker.watch
        watch.transition("a", "executing", "memory")
        assert worker.watch is watch
        watch.transition("b", "executing", "memory")
        assert worker.plugins == {}


@each_case(
    "timeout_s, waits", [(None, [BRIEF_S, None]), (1.0, [BRIEF_S, 1.0 - BRIEF_S]), (0.001, [0.001, 0.0])]
)
def test_a_task_that_waits_in_its_thread_leaves_after_a_brief_time_and_waits_for_the_rest(
    timeout_s: float | None, waits: list[float | None]
) -> None:
    worker, asked, away = FakeWorker(), [], []
    connection = cast(ClusterConnection, SimpleNamespace(current_task=lambda: worker.task("job")))

    def wait(seconds: float | None) -> bool:
        asked.append(seconds)
        away.append("job" in worker.watch.away if worker.plugins else False)
        return False

    assert not wait_in_thread(connection, wait, timeout_s, lambda: None)
    assert (asked, away) == (waits, [False, True])
    assert not worker.watch.away


def test_the_reader_in_a_released_task_gets_an_error() -> None:
    worker, cancelled = FakeWorker(), []
    place = TaskSlot(worker.task("job"), no_limit)
    place.on_release(lambda: cancelled.append(1))
    place.check()
    worker.watch.transition("job", "executing", "released")
    assert cancelled == [1]
    with pytest.raises(RequestCancelledError, match="released the task job"):
        place.check()


def test_a_task_of_another_program_that_waits_for_a_thread_lets_more_leave(clock: list[float]) -> None:
    worker = FakeWorker()
    parts = [worker.task(f"part-{number}") for number in range(6)]
    assert [each.secede(1) for each in parts] == [True, *[False] * 5]
    clock[0] += 1.0
    assert not parts[1].secede(1)
    worker.state.ready = Ready([SimpleNamespace(priority=(0, 1, 0)), SimpleNamespace(priority=(0, 2, 0))])
    assert [each.secede(1) for each in parts[1:4]] == [True, False, False]
    clock[0] += 1.0
    assert [each.secede(1) for each in parts[2:]] == [True] * 2 + [False] * 2
    worker.state.ready = Ready([])
    for each in parts:
        each.rejoin()
    assert [each.secede(1) for each in parts] == [True, *[False] * 5]


class Ready(list[Any]):
    """The tasks of a worker that wait for a thread."""

    def peek(self) -> Any:
        return self[0]
