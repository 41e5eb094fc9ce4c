"""Queues of tasks: each test runs on every kind."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis_servers import redis_server

from daskserve.client.functions.local import loop_in_thread
from daskserve.cluster.local.cluster import LocalCluster
from daskserve.cluster.task_queues import InstanceTaskQueues, file_of
from daskserve.common.clock import time_of_day
from daskserve.control.scaling import brokers
from daskserve.data.tasks import states
from daskserve.data.tasks.errors import TaskConflictError, TaskQueueError, TaskQueueFullError
from daskserve.data.tasks.payloads import digest_of
from daskserve.data.tasks.queues.instance import InstanceQueue
from daskserve.data.tasks.queues.plain import plain_task
from daskserve.data.tasks.queues.protocol import Change, Lease, TaskQueue
from daskserve.data.tasks.queues.redis_queue import RedisQueue
from daskserve.data.tasks.queues.sqlite import SqliteQueue
from daskserve.data.tasks.states import RetryRules, Task, TaskState
from daskserve.errors import BadRequestError
from daskserve.options.queues import QueueOptions
from daskserve.testing import wait_until

RULES = RetryRules(max_retries=1, result_ttl_s=60.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(folder) as url:
        yield url


@pytest.fixture(params=["sqlite", "redis", "instance"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TaskQueue]:
    made: TaskQueue
    if request.param == "instance":
        with loop_in_thread() as loop:
            yield from at_an_instance(loop)
        return
    if request.param == "sqlite":
        made = SqliteQueue(tmp_path / "folder" / "tasks.sqlite")
    else:
        made = RedisQueue(request.getfixturevalue("server"), f"test-{tmp_path.name}")
    made.open()
    yield made
    made.close()


def at_an_instance(loop: asyncio.AbstractEventLoop) -> Iterator[TaskQueue]:
    def run(coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    cluster = LocalCluster({}, workers=0)
    run(cluster.__aenter__())
    queue = InstanceQueue(synchronous=True)
    queue.join(cluster.program.connection, cluster.instance)
    yield queue
    run(cluster.close())


def task(id: str, due_at: float = 0.0, **changes: object) -> Task:
    made = Task(id, "q", "work", b"arguments", created_at=0.0, due_at=due_at)
    return replace(made, **changes)  # type: ignore[arg-type]


def add(queue: TaskQueue, *tasks: Task, limit: int = 1000, now: float = 0.0) -> list[bool]:
    return [is_new for _, is_new in queue.add(tasks, limit, now)]


def claim(queue: TaskQueue, now: float = 1.0, limit: int = 10, owner: str = "me") -> list[Task]:
    return queue.claim("q", owner, limit, now, 30.0)


def test_tasks_are_claimed_once_by_priority_and_age(queue: TaskQueue) -> None:
    add(queue, task("a"), task("b", priority=5), task("c"), task("late", due_at=50.0, priority=9))
    assert [each.id for each in claim(queue, limit=2)] == ["b", "a"]
    assert [each.id for each in claim(queue, owner="other")] == ["c"]
    assert claim(queue) == []
    assert [each.id for each in claim(queue, now=50.0)] == ["late"]


def test_a_claimed_task_equals_the_added_one(queue: TaskQueue) -> None:
    for size in (0, 10, 100_000):
        given = task(f"t{size}", payload=b"x" * size, digest="d", priority=-3, result_ttl_s=5.0)
        add(queue, given)
        (found,) = claim(queue)
        assert found == states.claimed(given, "me", 1.0, 30.0)
        assert queue.get("q", [given.id]) == [found]
        assert queue.get("q", ["unknown"]) == [None]


def test_an_id_makes_a_task_once_until_it_is_forgotten(queue: TaskQueue) -> None:
    assert add(queue, task("a", digest="1"), task("a", digest="1")) == [True, False]
    with pytest.raises(TaskConflictError, match="'a'"):
        add(queue, task("new"), task("a", digest="2"))
    assert queue.get("q", ["new"]) == [None]  # all tasks are stored, or none
    (begun,) = claim(queue)
    queue.write([Change(states.done(begun, b"result", 2.0, RULES))])
    assert add(queue, task("a", digest="1"), now=61.0) == [False]
    assert add(queue, task("a", digest="1"), now=62.0) == [True]


def test_a_full_queue_refuses_tasks(queue: TaskQueue) -> None:
    add(queue, task("a"), task("b"), limit=2)
    with pytest.raises(TaskQueueFullError, match="max_queue_length=2"):
        add(queue, task("c"), limit=2)
    assert add(queue, task("a"), limit=2) == [False]  # the task exists
    claim(queue, limit=1)
    assert add(queue, task("c"), limit=2) == [True]


def test_a_change_is_written_only_if_the_task_has_not_changed(queue: TaskQueue) -> None:
    add(queue, task("a"))
    (begun,) = claim(queue)
    cancelled = states.cancelled(begun, 2.0, RULES)
    assert queue.write([Change(cancelled)]) == [True]
    lost = Change(states.done(begun, b"", 3.0, RULES), task("no letter", queue="dead"))
    stopped = states.stopped(cancelled, 3.0, RULES)
    assert queue.write([lost, Change(stopped, task("letter", queue="dead")), lost]) == [False, True, False]
    assert queue.get("q", ["a"]) == [stopped]
    assert [each.id for each in queue.claim("dead", "me", 9, 9.0, 30.0)] == ["letter"]
    assert queue.get("dead", ["no letter"]) == [None]


def test_tasks_of_different_queues_are_different_whatever_their_names(queue: TaskQueue) -> None:
    names = [("mail", "eu:7"), ("mail:eu", "7"), ("mail%3Aeu", "7"), ("mail%eu", "7")]
    assert add(queue, *(task(id, queue=name, digest=name) for name, id in names)) == [True] * 4
    for name, id in names:
        assert [each.id for each in queue.claim(name, "a:b", 9, 1.0, 30.0)] == [id]
        assert [each.id for each in queue.held(name, "a:b")] == [id]
        (kept,) = queue.get(name, [id])
        assert kept is not None
        assert kept.digest == name


def test_the_digest_is_that_of_equal_arguments_in_all_processes() -> None:
    name = "Ann"
    given = {"frm": name, "to": name, "all": {"x", "y", "z"}, "at": (1, 2.5)}
    again = json.loads('{"at": [1, 2.5], "to": "Ann", "frm": "Ann"}')
    code = f"from daskserve.data.tasks.payloads import digest_of; print(digest_of([10**5000], {given!r}))"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert alone.stdout.strip() == digest_of((10**5000,), given)
    assert digest_of([], again) == digest_of((), {key: given[key] for key in again})
    others = [1, "1", 1.0, True, None, [1], {1}, {1: 1}, b"1", {"1": 1}, [[1]], object(), "\udc80"]
    assert len({digest_of([each], {}) for each in others}) == len(others)
    endless: list[object] = []
    endless.append(endless)
    assert digest_of([endless], {}) == ""


def test_a_retry_is_claimed_at_its_time(queue: TaskQueue) -> None:
    add(queue, task("a"))
    (begun,) = claim(queue)
    failed = states.failed(begun, "error", 2.0, 0.0, RULES)
    queue.write([Change(failed)])
    assert claim(queue, now=2.5) == []
    assert [each.attempts for each in claim(queue, now=3.0)] == [2]


def test_leases_end_unless_they_are_renewed(queue: TaskQueue) -> None:
    add(queue, task("a"), task("b"))
    claim(queue)
    queue.renew("q", "me", ["b", "unknown"], 100.0)
    queue.renew("q", "other", ["a"], 100.0)
    assert queue.held("q", "other") == []
    assert sorted(queue.held("q", "me")) == [Lease("a", 1, False), Lease("b", 1, False)]
    assert queue.expired("q", 30.0, 10) == []
    (expired,) = queue.expired("q", 31.0, 10)
    assert expired.id == "a"
    queue.write([Change(states.lost(expired, 31.0, RULES))])
    assert [each.id for each in claim(queue, now=32.0, owner="other")] == ["a"]
    assert queue.held("q", "me") == [Lease("b", 1, False)]


def test_progress_is_kept_while_the_attempt_runs(queue: TaskQueue) -> None:
    add(queue, task("a"))
    (begun,) = claim(queue)
    queue.note("q", "a", 1, b"half")
    queue.note("q", "a", 2, b"of another attempt")
    (kept,) = queue.get("q", ["a"])
    assert kept is not None
    assert kept.progress == b"half"
    assert queue.write([Change(states.done(begun, b"", 2.0, RULES))]) == [True]


def test_tasks_are_counted_and_forgotten(queue: TaskQueue) -> None:
    add(queue, task("a"), task("b", due_at=5.0), task("c", due_at=90.0))
    assert queue.stats("q", 8.0).oldest_s == 8.0
    (begun,) = claim(queue)
    stats = queue.stats("q", 8.0)
    assert (stats.waiting, stats.running, stats.oldest_s) == (2, 1, 3.0)
    queue.write([Change(states.done(begun, b"", 2.0, RULES))])
    assert [each.id for each in queue.tasks("q", TaskState.DONE, 10)] == ["a"]
    assert queue.purge("q", 61.0, 10) == 0
    assert queue.purge("q", 62.0, 10) == 1
    stats = queue.stats("q", 8.0)
    assert (stats.waiting, stats.running, stats.counts.get(TaskState.DONE, 0)) == (2, 0, 0)
    assert queue.stats("other", 8.0).waiting == 0


def test_consumers_in_many_threads_share_the_tasks(queue: TaskQueue) -> None:
    add(queue, *(task(str(number)) for number in range(200)))
    found: list[str] = []

    def consume(owner: str) -> None:
        while tasks := claim(queue, owner=owner, limit=7):
            found.extend(each.id for each in tasks)

    threads = [threading.Thread(target=consume, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=int) == [str(number) for number in range(200)]


@pytest.mark.parametrize("kind", ["sqlite", "redis", "instance"])
def test_the_policy_queue_sees_the_tasks_that_could_run(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    urls = {"sqlite": f"sqlite://{tmp_path}/tasks.sqlite", "instance": "instance://"}
    url = urls.get(kind) or request.getfixturevalue("server")
    # That of the instance is in a file, too, which another process may open.
    store = f"sqlite:///{tmp_path}/serve.db"
    kept = InstanceTaskQueues(store, "shop")

    async def length() -> float:
        backlog = brokers.open_queue(QueueOptions(url, "q"), lambda url, login: asyncio.sleep(0, b""), kept)
        try:
            return await backlog.read()
        finally:
            await backlog.close()
            await kept.close()

    assert asyncio.run(length()) == 0.0
    path = file_of(store, "shop", "") if kind == "instance" else tmp_path / "tasks.sqlite"
    queue: TaskQueue = RedisQueue(url, "daskserve") if kind == "redis" else SqliteQueue(path)
    # c is due, although no consumer has seen that.
    add(queue, task("a"), task("b"), task("c", due_at=90.0), task("d", due_at=2.0**39))
    assert asyncio.run(length()) == 3.0
    claim(queue, limit=1)
    assert asyncio.run(length()) == 2.0
    queue.close()


def test_a_file_that_is_no_queue_is_an_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but a longer text than the header of one is" * 5)
    with pytest.raises(TaskQueueError, match=r"notes\.txt"):
        SqliteQueue(path).open()
    newer = tmp_path / "newer.sqlite"
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(TaskQueueError, match="newer daskserve"):
        SqliteQueue(newer).open()


def plain(id: str) -> list[Any]:
    return plain_task(task(id))


async def test_the_queues_of_an_instance_are_beside_its_store_and_leases_outlive_its_scheduler(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/serve.db"
    first = InstanceTaskQueues(url, "shop/eu")
    await first.call("add", [False, [plain("a")], 10, 0.0])
    await first.call("claim", ["q", "me", 1, 1.0, 30.0])
    await first.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["serve.db.shop%2Feu.tasks"]
    again = InstanceTaskQueues(url, "shop/eu")
    assert await again.call("held", ["q", "me"]) == [("a", 1, False)]
    # A consumer could not renew its lease meanwhile.
    assert await again.call("expired", ["q", time_of_day() + 5.0, 10]) == []
    assert len(await again.call("expired", ["q", time_of_day() + 60.0, 10])) == 1
    await again.close()


async def test_as_many_idle_consumers_are_woken_as_there_are_tasks() -> None:
    queues = InstanceTaskQueues("memory://", "shop", "idle")

    def waiting(count: int, queue: str = "q", timeout_s: float = 20.0) -> list[asyncio.Task[bool]]:
        calls = [queues.call("wait", [queue, 0.02, timeout_s]) for _ in range(count)]
        return [asyncio.ensure_future(call) for call in calls]

    idle = waiting(5)
    assert await asyncio.gather(*waiting(1, "other", 0.1)) == [False]
    await queues.call("add", [False, [plain("a"), plain("b")], 10, 0.0])
    await wait_until(lambda: sum(each.done() for each in idle) >= 2)
    assert len(await queues.call("claim", ["q", "me", 9, time_of_day(), 30.0])) == 2
    woken = sum(each.done() for each in idle)
    assert woken < 5
    late = plain_task(task("c", due_at=time_of_day() + 0.05))
    await queues.call("add", [False, [late], 10, 0.0])
    await wait_until(lambda: sum(each.done() for each in idle) > woken)  # once it is due
    await queues.close()
    await asyncio.wait(idle)
    assert not file_of("memory://", "shop", "idle").exists()


async def test_the_queues_of_an_instance_in_memory_end_with_it() -> None:
    path = file_of("memory://", "shop", "start")
    queues = InstanceTaskQueues("memory://", "shop", "start")
    await queues.call("open", [])
    assert path.stat().st_mode & 0o077 == 0
    await queues.close()
    assert not path.exists()


async def test_a_store_that_cannot_keep_tasks_is_an_error_that_names_those_that_can() -> None:
    queues = InstanceTaskQueues("s3://user:secret@bucket/folder", "shop")
    with pytest.raises(BadRequestError, match="RedisAdapterConfig") as failed:
        await queues.call("open", [])
    assert "secret" not in str(failed.value)
    await queues.close()


def test_a_queue_of_no_instance_says_how_to_find_one() -> None:
    with pytest.raises(TaskQueueError, match=r"serve\.connect"):
        InstanceQueue(synchronous=False).open()
