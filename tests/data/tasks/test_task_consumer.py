"""One consumer of a queue: what it does if handlers, ends and the queue itself go wrong."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import until
from tables import each_case

import daskserve as serve
from daskserve.common.clock import LoopClock
from daskserve.data.tasks import states
from daskserve.data.tasks.consumer import Released, TaskConsumer
from daskserve.data.tasks.errors import TaskQueueError
from daskserve.data.tasks.queues.protocol import Change
from daskserve.data.tasks.queues.sqlite import SqliteQueue
from daskserve.data.tasks.schedules import last_time, next_time
from daskserve.data.tasks.states import RetryRules, Task, TaskState
from daskserve.errors import BadRequestError


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqliteQueue]:
    made = SqliteQueue(tmp_path / "tasks.sqlite")
    made.open()
    yield made
    made.close()


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


def consumer(
    queue: SqliteQueue, run: Callable[[Task], Awaitable[bytes]], call: Any = inline, lease_s: float = 30.0
) -> TaskConsumer:
    options = serve.tasks.SQLiteAdapterConfig(poll_interval_s=0.005, lease_s=lease_s)
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=options)
    clock, rng = LoopClock(), random.Random(1)
    return TaskConsumer(queue, config, "me", ["work"], run, lambda: 4, clock=clock, rng=rng, call=call)


async def no_run(task: Task) -> bytes:
    raise AssertionError("there is no task")


def add(queue: SqliteQueue, *ids: str, **changes: Any) -> None:
    now = time.time()
    queue.add([Task(id, "q", "work", b"", now, now, **changes) for id in ids], 100, now)


def kept(queue: SqliteQueue, id: str) -> Task:
    (found,) = queue.get("q", [id])
    assert found is not None
    return found


async def test_an_end_that_cannot_be_kept_stops_no_other(queue: SqliteQueue) -> None:
    async def run(task: Task) -> bytes:
        if task.id == "odd":
            raise RuntimeError("no error that a run should have")
        return {"bad": "text \udc80", "large": 2**70}.get(task.id, b"r")  # type: ignore[return-value]

    made = consumer(queue, run)
    add(queue, "bad", "good", "odd", "large")
    add(queue, "forever", result_ttl_s="1h")  # a program of an older version may have submitted it
    made.start()
    await until(lambda: all(kept(queue, id).has_ended for id in ("bad", "good", "odd", "large", "forever")))
    assert kept(queue, "good").state is TaskState.DONE
    for id in ("bad", "odd", "large", "forever"):
        assert kept(queue, id).state is TaskState.DEAD
        assert "cannot be kept" in kept(queue, id).error
    await made.drained()
    await made.close(1.0)


async def test_a_fault_of_the_consumer_is_logged_and_one_of_the_queue_once_it_lasts(
    queue: SqliteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = []

    async def call(function: Any, *args: Any) -> Any:
        if errors and function == queue.claim:
            raise errors.pop(0)
        return await inline(function, *args)

    async def run(task: Task) -> bytes:
        return b"r"

    def none_left() -> bool:
        return not errors

    for given, fault, warned in (
        ([KeyError("a fault")], True, False),
        ([TaskQueueError("it is away")], False, False),
        ([TaskQueueError("it is away")] * 2, False, True),
    ):
        caplog.clear()
        errors += given
        made = consumer(queue, run, call)
        made.start()
        await until(none_left)
        task_id = f"a{len(given)}{fault}"
        add(queue, task_id)
        await until(lambda id=task_id: kept(queue, id).has_ended)
        await made.close(1.0)
        assert ("the consumer failed, and goes on" in caplog.text) == fault
        assert ("it is away" in caplog.text) == warned


async def test_tasks_whose_consumer_is_lost_go_to_another_one(
    queue: SqliteQueue,
) -> None:
    ran: list[str] = []

    async def run(task: Task) -> bytes:
        ran.append(task.id)
        return b"r"

    add(queue, "a", "b", "c")
    claimed = {each.id: each for each in queue.claim("q", "lost", 3, time.time(), 0.0)}
    queue.write([Change(states.cancelled(claimed["c"], time.time(), RetryRules()))])
    made = consumer(queue, run)
    made.start()
    await until(lambda: all(kept(queue, id).has_ended for id in "abc"))
    await made.close(1.0)
    assert sorted(ran) == ["a", "b"]
    assert [(kept(queue, id).state, kept(queue, id).losses) for id in "abc"] == [
        (TaskState.DONE, 1),
        (TaskState.DONE, 1),
        (TaskState.CANCELLED, 0),
    ]


class EarlyQueue(SqliteQueue):
    """Says that a task is there which its consumer does not see yet, as with clocks that differ."""

    is_early, waits = True, 0

    async def wait(self, queue: str, interval_s: float) -> None:
        self.waits += 1
        if not self.is_early:
            await asyncio.Event().wait()


@pytest.mark.virtual_time
async def test_an_idle_consumer_waits_at_its_queue_and_never_without_a_pause(tmp_path: Path) -> None:
    queue = EarlyQueue(tmp_path / "tasks.sqlite")
    queue.open()
    claims = []

    async def call(function: Any, *args: Any) -> Any:
        claims.extend([1] if function == queue.claim else [])
        return await inline(function, *args)

    made = consumer(queue, no_run, call)
    made.start()
    await asyncio.sleep(1.0)
    assert 100 < len(claims) <= 2 * 1.0 / 0.005 + 2
    queue.is_early = False
    await asyncio.sleep(0.1)
    before = len(claims), queue.waits
    await asyncio.sleep(100.0)
    assert (len(claims), queue.waits) == before
    await made.close(1.0)  # does not wait for the queue
    assert asyncio.get_running_loop().time() < 110
    queue.close()


async def test_an_error_while_a_changed_task_is_read_loses_no_end(queue: SqliteQueue) -> None:
    go, failures = asyncio.Event(), [1]

    async def run(task: Task) -> bytes:
        await go.wait()
        return b"r"

    async def call(function: Any, *args: Any) -> Any:
        if go.is_set() and function == queue.get and failures:
            raise TaskQueueError(f"away {failures.pop()}")
        return await inline(function, *args)

    made = consumer(queue, run, call)
    add(queue, "a", "b")
    made.start()
    await until(lambda: made.running == 2)
    queue.write([Change(states.cancelled(kept(queue, "a"), time.time(), RetryRules()))])
    go.set()
    await until(lambda: kept(queue, "a").has_ended and kept(queue, "b").has_ended)
    assert not failures
    assert kept(queue, "a").state is TaskState.CANCELLED  # although its result existed
    await made.drained()
    await made.close(1.0)


async def test_a_task_given_back_and_claimed_again_at_once_runs_once_more(queue: SqliteQueue) -> None:
    runs: list[int] = []
    go = asyncio.Event()

    async def run(task: Task) -> bytes:
        runs.append(task.revision)
        if len(runs) == 1:
            raise Released
        await go.wait()
        return b"r"

    async def call(function: Any, *args: Any) -> Any:
        found = await inline(function, *args)
        if function == queue.write:
            await asyncio.sleep(0.03)  # the other loops go on first
        return found

    made = consumer(queue, run, call)
    add(queue, "a")
    made.start()
    await until(lambda: len(runs) == 2)
    await asyncio.sleep(0.05)
    assert made.running == 1
    go.set()
    await until(lambda: kept(queue, "a").has_ended)
    await made.close(1.0)
    assert len(runs) == 2


async def test_a_task_is_not_given_back_twice_if_the_first_answer_is_lost(queue: SqliteQueue) -> None:
    runs: list[int] = []
    go, failures = asyncio.Event(), [1]

    async def run(task: Task) -> bytes:
        runs.append(task.revision)
        if len(runs) == 1:
            raise Released
        await go.wait()
        return b"r"

    async def call(function: Any, *args: Any) -> Any:
        answer = await inline(function, *args)
        if function == queue.write and failures:
            raise TaskQueueError(f"the answer {failures.pop()} is lost")
        if function == queue.get:
            go.set()  # the consumer reads the tasks that it could not write
        return answer

    made = consumer(queue, run, call)
    add(queue, "a")
    made.start()
    await until(lambda: kept(queue, "a").has_ended)
    assert len(runs) == 2
    await made.drained()
    await made.close(1.0)


async def test_tasks_claimed_during_the_stop_do_not_begin(queue: SqliteQueue) -> None:
    claimed, go = asyncio.Event(), asyncio.Event()
    runs: list[str] = []

    async def run(task: Task) -> bytes:
        runs.append(task.id)
        return b"r"

    async def call(function: Any, *args: Any) -> Any:
        found = await inline(function, *args)
        if function == queue.claim and found:
            claimed.set()
            await go.wait()
        return found

    made = consumer(queue, run, call)
    add(queue, "a")
    made.start()
    await claimed.wait()
    made.pause()
    go.set()
    await made.close(1.0)
    task = kept(queue, "a")
    assert (task.state, task.attempts, task.losses, runs) == (TaskState.QUEUED, 0, 0, [])


async def test_errors_of_the_queue_do_not_postpone_the_renewal_of_leases(queue: SqliteQueue) -> None:
    go = asyncio.Event()

    async def run(task: Task) -> bytes:
        await go.wait()
        return b"r"

    async def call(function: Any, *args: Any) -> Any:
        if function == queue.held:
            raise TaskQueueError("away")
        return await inline(function, *args)

    made = consumer(queue, run, call, lease_s=0.3)
    add(queue, "a")
    made.start()
    await until(lambda: made.running)
    await asyncio.sleep(0.5)
    go.set()
    await until(lambda: kept(queue, "a").has_ended)
    assert (kept(queue, "a").attempts, kept(queue, "a").losses) == (1, 0)
    await made.close(1.0)


def test_the_next_time_of_a_period_is_later() -> None:
    for period in (1.68, 1.72, 86_400 / 7, 3_600 / 11):
        schedule = serve.tasks.TaskSchedule(task="work", every_s=period)
        at = next_time(schedule, 1.7e9)
        for _ in range(20_000):
            following = next_time(schedule, at)
            assert at < following < at + 1.5 * period
            at = following


def test_a_program_s_functions_keep_neither_the_queue_nor_its_consumer_from_work(tmp_path: Path) -> None:
    options = serve.tasks.SQLiteAdapterConfig(
        path=str(tmp_path / "t.sqlite"), poll_interval_s=0.005, lease_s=0.3
    )
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=options, max_retries=0)
    adapter: Any = serve.tasks.instantiate_adapter_from_config(config)
    adapter.initialize(40)
    runs: list[int] = []
    go = threading.Event()

    def slow(number: int) -> None:
        runs.append(number)
        go.wait(5)

    def leaves() -> None:
        raise SystemExit(3)

    async def cancels() -> None:
        raise asyncio.CancelledError

    def surrogate() -> None:
        raise ValueError("file \udc80 is not there")

    for function in (slow, leaves, cancels, surrogate):
        adapter.register_task_handle(function)
    adapter.start_consumer()
    bad = [adapter.enqueue_task_sync(name) for name in ("leaves", "cancels", "surrogate")]
    found = [adapter.wait_for_task_sync(each.id, 5) for each in bad]
    assert [each.status for each in found] == ["FAILURE"] * 3
    assert "\\udc80" in found[2].result
    slow_ones = [adapter.enqueue_task_sync("slow", [number]) for number in range(38)]
    threading.Timer(0.8, go.set).start()
    found = [adapter.wait_for_task_sync(each.id, 5) for each in slow_ones]
    assert {each.status for each in found} == {"SUCCESS"}
    assert sorted(runs) == list(range(38))
    for ttl in ("1h", -1, float("nan"), True):
        with pytest.raises(BadRequestError, match="result_ttl_s"):
            adapter.enqueue_task_sync("slow", [1], result_ttl_s=ttl)
    adapter.shutdown()


@each_case("options", [{"every_s": 1.0}, {"cron": "* * * * *"}, {"cron": "* * * 1 *"}, {"every_s": 1e6}])
def test_a_schedule_whose_consumers_were_away_for_a_year_has_one_task(options: dict[str, Any]) -> None:
    schedule, now = serve.tasks.TaskSchedule(task="work", catch_up_s=31_000_000.0, **options), 1_767_225_600.5
    at = last_time(schedule, now - schedule.catch_up_s, now)
    assert now - schedule.catch_up_s < at <= now < next_time(schedule, at)
    assert last_time(schedule, at, now) == next_time(schedule, at)  # it was made


def test_a_schedule_catches_up_with_a_year_at_most() -> None:
    with pytest.raises(ValueError, match="less than or equal to"):
        serve.tasks.TaskSchedule(task="work", every_s=1.0, catch_up_s=32_000_000.0)
