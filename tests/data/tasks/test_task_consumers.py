"""Task consumers on an instance in this process: tasks are submitted, and replicas run them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import quick_instance
from gates import Gates, anew_for_each_test
from prometheus_client import generate_latest
from tables import each_case

import daskserve as serve
from daskserve.common.clock import LoopClock, seeded_rng
from daskserve.data.tasks.consumer import BATCH
from daskserve.data.tasks.durable import new_consumer
from daskserve.data.tasks.errors import TaskConflictError
from daskserve.data.tasks.states import Task, TaskState
from daskserve.errors import BadRequestError, BodyTooLargeError, DeployError, NotFoundError, UnpicklableError
from daskserve.task_processor import SQLiteTaskProcessorAdapter, TaskProcessorAdapter
from daskserve.testing import local_instance


class Meeting(Gates):
    """What the handlers note."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.running = self.most = 0


MEETING = Meeting()
fresh = anew_for_each_test(MEETING)


class Work:
    """The handlers of most tests."""

    @serve.tasks.task_handler
    def note(self, value: Any) -> str:
        MEETING.seen.append(value)
        return serve.tasks.get_task_context().id

    @serve.tasks.task_handler
    def never(self, x: int, *, y: int) -> None:
        raise KeyError("always")

    @serve.tasks.task_handler
    def second_time(self) -> str:
        if serve.tasks.get_task_context().attempt < 2:
            raise ValueError("not yet")
        return "done"

    @serve.tasks.task_handler
    async def sleep(self) -> None:
        MEETING.seen.append("began")
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            MEETING.seen.append("cancelled")
            raise

    @serve.tasks.task_handler
    def gated(self) -> str:
        MEETING.running += 1
        MEETING.most = max(MEETING.most, MEETING.running)
        for step in range(2):
            serve.tasks.get_task_context().report_progress({"step": step})
        MEETING.go.wait(10)
        MEETING.running -= 1
        return "done"

    @serve.tasks.task_handler
    def large(self, size: int) -> bytes:
        return b"x" * size


class Letters:
    """Handles dead letters."""

    @serve.tasks.task_handler
    def never(self, *parts: Any) -> None:
        MEETING.seen.append(parts)

    @serve.tasks.task_handler
    def unknown(self, *parts: Any) -> None:
        MEETING.seen.append(parts)


QUICK: dict[str, Any] = {"backoff_s": 0.01, "poll_interval_s": 0.01}


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        yield client


@pytest.fixture
def config(tmp_path: Path) -> serve.tasks.TaskProcessorConfig:
    return configured(tmp_path)


def configured(
    folder: Path, name: str = "q", queue: Any = QUICK, **options: Any
) -> serve.tasks.TaskProcessorConfig:
    kept = serve.tasks.SQLiteAdapterConfig(path=str(folder / "tasks.sqlite"), **queue)
    return serve.tasks.TaskProcessorConfig(queue_name=name, adapter_config=kept, **options)


@pytest.fixture
def tasks(config: serve.tasks.TaskProcessorConfig) -> Iterator[SQLiteTaskProcessorAdapter]:
    adapter = serve.tasks.instantiate_adapter_from_config(config)
    assert isinstance(adapter, SQLiteTaskProcessorAdapter)
    yield adapter
    if "default" in serve.status().applications:
        serve.delete("default")
    adapter.shutdown()


def metrics() -> str:
    return generate_latest().decode()


def poll_for(condition: Callable[[], Any]) -> Any:
    return quick_instance.poll_for(condition, what=lambda: "the condition is still false")


def ended(tasks: TaskProcessorAdapter, *ids: str, status: str = "SUCCESS") -> list[serve.tasks.TaskResult]:
    """Return tasks once they have this status."""

    def found() -> list[serve.tasks.TaskResult] | None:
        results = [tasks.get_task_status_sync(id) for id in ids]
        return results if all(each.status == status for each in results) else None

    results: list[serve.tasks.TaskResult] = poll_for(found)
    return results


def run(config: serve.tasks.TaskProcessorConfig, cls: type = Work, **options: Any) -> serve.Handle:
    cls = type(cls.__name__, (cls,), {})  # each with a queue of its own
    made = serve.deployment(**options)(serve.tasks.task_consumer(task_processor_config=config)(cls))
    return serve.run(made.bind())


def test_plain_and_async_handlers_run_tasks_and_the_class_still_answers_calls(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    class Sums:
        @serve.tasks.task_handler
        def add(self, x: int, *, y: int) -> int:
            return x + y

        @serve.tasks.task_handler(name="subtract")
        async def minus(self, x: int, y: int) -> int:
            return x - y

    before = tasks.enqueue_task_sync("add", [1], {"y": 2})
    assert (before.status, before.result, before.is_new) == ("PENDING", None, True)
    handle = run(config, Sums)
    later = tasks.enqueue_task_sync("subtract", args=(1, 2))
    assert [each.result for each in ended(tasks, before.id, later.id)] == [3, -1]
    assert handle.add.remote(3, y=4).result() == 7
    assert tasks.get_metrics_sync()["SUCCESS"] == 2
    assert tasks.health_check_sync() == [{"q": {"ok": "pong"}}]
    # Counted once a second, and shown to Prometheus.
    poll_for(lambda: re.search(r'task_queue_tasks\{.*queue="q".*state="SUCCESS"\} 2.0', metrics()))
    assert re.search(r'tasks_ended_total\{.*queue="q".*state="SUCCESS"\} 2.0', metrics())
    with pytest.raises(NotFoundError, match="unknown"):
        tasks.get_task_status_sync("unknown")


def test_programs_and_replicas_share_the_queue_that_the_instance_keeps_by_default(
    client: serve.Client,
) -> None:
    class Sums:
        @serve.tasks.task_handler
        def add(self, x: int, y: int) -> int:
            serve.tasks.get_task_context().report_progress("begun")
            return x + y

        def submit(self, x: int) -> str:
            tasks = serve.tasks.instantiate_adapter_from_config(
                serve.tasks.TaskProcessorConfig(queue_name="sums")
            )
            return tasks.enqueue_task_sync("add", [x, 1]).id

    config = serve.tasks.TaskProcessorConfig(queue_name="sums")
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    mine = tasks.enqueue_task_sync("add", [1, 2])
    theirs = run(config, Sums).submit.remote(3).result()
    assert [each.result for each in ended(tasks, mine.id, theirs)] == [3, 4]
    again = serve.tasks.instantiate_adapter_from_config(config, client=client)
    assert again.get_task_status_sync(mine.id).attempts == 1
    serve.delete("default")


def test_an_id_makes_a_task_run_once(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    run(config)
    first = tasks.enqueue_task_sync("note", [1], id="mine")
    ended(tasks, "mine")
    second = tasks.enqueue_task_sync("note", [1], id="mine")
    assert (first.is_new, second.is_new, second.result, MEETING.seen) == (True, False, "mine", [1])
    with pytest.raises(TaskConflictError):
        tasks.enqueue_task_sync("note", [2], id="mine")


def test_a_task_that_fails_is_tried_again_and_then_is_a_dead_letter(tmp_path: Path) -> None:
    config = configured(
        tmp_path, max_retries=2, failed_task_queue_name="failed", unprocessable_task_queue_name="bad"
    )
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    run(config)
    good, bad = tasks.enqueue_task_sync("second_time"), tasks.enqueue_task_sync("never", [1], {"y": 2})
    odd = tasks.enqueue_task_sync("unknown", [3])
    assert ended(tasks, good.id)[0].attempts == 2
    (failure,) = ended(tasks, bad.id, status="FAILURE")
    assert (failure.attempts, failure.result) == (3, "KeyError: 'always'")
    assert 'raise KeyError("always")' in failure.traceback
    (rejected,) = ended(tasks, odd.id, status="REJECTED")
    assert (
        rejected.result
        == "No handler has the name 'unknown'; there are: gated, large, never, note, second_time, sleep."
    )
    for name in ("failed", "bad"):
        run(configured(tmp_path, name), Letters)
        poll_for(lambda name=name: len(MEETING.seen) == 1 + (name == "bad"))
    assert MEETING.seen[0][:4] == (bad.id, "KeyError: 'always'", [1], {"y": 2})
    assert MEETING.seen[1][:3] == ("unknown", odd.id, {"args": [3], "kwargs": {}})
    tasks.shutdown()


def test_each_final_failure_is_one_dead_letter_and_a_cancelled_task_has_none(tmp_path: Path) -> None:
    began, go = threading.Event(), threading.Event()

    def bad() -> None:
        began.set()
        assert go.wait(10)
        raise ValueError("bad")

    config = configured(tmp_path, max_retries=0, failed_task_queue_name="dead")
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    dead = serve.tasks.instantiate_adapter_from_config(configured(tmp_path, "dead"))
    assert isinstance(tasks, SQLiteTaskProcessorAdapter)
    tasks.register_task_handle(bad)
    tasks.start_consumer()
    go.set()
    failed = tasks.enqueue_task_sync("bad")
    assert tasks.wait_for_task_sync(failed.id, 10).status == "FAILURE"
    tasks.retry_task_sync(failed.id)
    again = tasks.wait_for_task_sync(failed.id, 10)
    assert (again.status, again.attempts) == ("FAILURE", 2)
    assert dead.get_metrics_sync()["waiting"] == 2
    go.clear()
    began.clear()
    cancelled = tasks.enqueue_task_sync("bad")
    assert began.wait(10)
    assert tasks.wait_for_task_sync(cancelled.id, 0.01).status == "STARTED"
    tasks.cancel_task_sync(cancelled.id)
    go.set()  # it fails before its consumer has seen that it is cancelled
    assert asyncio.run(tasks.wait_for_task_async(cancelled.id)).status == "REVOKED"
    assert dead.get_metrics_sync()["waiting"] == 2
    tasks.shutdown()
    dead.shutdown()


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_consumer_that_returns_lost_tasks_logs_their_number(
    tasks: SQLiteTaskProcessorAdapter, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    lost = Task("lost", "q", "work", b"", 0.0, 0.0, state=TaskState.RUNNING, owner="o", lease_until=1.0)
    counted = asyncio.Event()

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        if function.__name__ == "expired":
            return [] if counted.is_set() else [lost]
        if function.__name__ == "write":
            return [is_first]  # otherwise, another consumer has returned it meanwhile
        if function.__name__ == "stats":
            counted.set()
        return function(*args)

    async def run(task: Task) -> bytes:
        return b""

    consumer = new_consumer(tasks, "o", [], run, lambda: 0, clock=LoopClock(), rng=seeded_rng(1), call=call)
    consumer.start()
    await asyncio.wait_for(counted.wait(), 10)
    await consumer.close()
    logged = [text for text in caplog.messages if "lost" in text]
    assert logged == (["Queue 'q': 1 task had lost the consumer"] if is_first else [])


async def test_a_consumer_forgets_as_many_tasks_as_have_expired(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    old = Task("", "q", "work", b"", 0.0, 0.0, state=TaskState.DONE, expires_at=1.0)
    tasks.queue.add([replace(old, id=str(number)) for number in range(2 * BATCH + 1)], 9999, 0.0)
    calls: list[str] = []
    counted = asyncio.Event()

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        calls.append(function.__name__)
        if function.__name__ == "stats":
            counted.set()
        return function(*args)

    async def run(task: Task) -> bytes:
        return b""

    consumer = new_consumer(tasks, "o", [], run, lambda: 1, clock=LoopClock(), rng=seeded_rng(1), call=call)
    consumer.start()
    await asyncio.wait_for(counted.wait(), 10)
    assert calls.count("purge") == 3
    await consumer.close()


def test_tasks_are_cancelled_while_they_wait_and_while_they_run(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    later = tasks.enqueue_task_sync("sleep", delay_s=60)
    assert tasks.cancel_task_sync(later.id)
    assert tasks.get_task_status_sync(later.id).status == "REVOKED"
    run(config, graceful_shutdown_timeout_s=0.1)
    now = tasks.enqueue_task_sync("sleep")
    ended(tasks, now.id, status="STARTED")
    poll_for(lambda: MEETING.seen)
    assert tasks.cancel_task_sync(now.id)
    ended(tasks, now.id, status="REVOKED")
    poll_for(lambda: MEETING.seen == ["began", "cancelled"])
    assert tasks.cancel_task_sync(now.id)
    assert tasks.retry_task_sync(later.id).status == "PENDING"


def test_a_replica_runs_as_many_tasks_as_it_has_slots(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    ids = [each.id for each in tasks.submit_many([{"task_name": "gated"}] * 7)]
    run(config, max_ongoing_requests=3)
    poll_for(lambda: MEETING.running == 3)
    poll_for(lambda: tasks.get_metrics_sync()["running"] == 3)
    progress = lambda: [tasks.get_task_status_sync(id).progress for id in ids]  # noqa: E731
    poll_for(lambda: progress().count({"step": 1}) == 3)
    MEETING.go.set()
    ended(tasks, *ids)
    assert MEETING.most == 3


def test_a_replica_that_is_busy_with_requests_leaves_tasks_to_the_others(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    class Busy(Work):
        def __call__(self) -> None:
            MEETING.running += 1
            MEETING.go.wait(10)

    handle = run(config, Busy, max_ongoing_requests=1)
    answer = handle.remote()
    poll_for(lambda: MEETING.running)
    task = tasks.enqueue_task_sync("note", [1])
    threading.Event().wait(0.05)  # five times as long as an idle consumer takes
    assert tasks.get_task_status_sync(task.id).status == "PENDING"
    MEETING.go.set()
    answer.result()
    ended(tasks, task.id)


def test_a_replica_that_stops_finishes_its_tasks_and_leaves_the_others(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    run(config, max_ongoing_requests=2, graceful_shutdown_timeout_s=0.5)
    first, endless = tasks.enqueue_task_sync("gated"), tasks.enqueue_task_sync("sleep")
    ended(tasks, first.id, endless.id, status="STARTED")
    left = tasks.enqueue_task_sync("note", [1])
    threading.Timer(0.1, MEETING.go.set).start()
    serve.delete("default")
    assert tasks.get_task_status_sync(first.id).result == "done"
    for id in (endless.id, left.id):
        found = tasks.get_task_status_sync(id)
        assert (found.status, found.attempts) == ("PENDING", 0)


def test_tasks_begin_at_their_time_and_by_priority(
    config: serve.tasks.TaskProcessorConfig, tasks: SQLiteTaskProcessorAdapter
) -> None:
    tasks.enqueue_task_sync("note", ["low"], priority=-1)
    tasks.enqueue_task_sync("note", ["high"], priority=1)
    soon = tasks.enqueue_task_sync("note", ["soon"], delay_s=1.0, priority=2)
    at = tasks.enqueue_task_sync("note", ["at"], at=datetime.now(UTC) + timedelta(hours=1))
    run(config, max_ongoing_requests=1)
    ended(tasks, soon.id)
    assert MEETING.seen == ["high", "low", "soon"]
    assert tasks.get_task_status_sync(at.id).status == "PENDING"


def test_large_arguments_and_results_are_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, queue={**QUICK, "max_payload_bytes": "100kB"})
    tasks = serve.tasks.instantiate_adapter_from_config(config)

    run(config)
    with pytest.raises(BodyTooLargeError, match="max_payload_bytes=100000"):
        tasks.enqueue_task_sync("large", [b"x" * 100_001])
    large, small = tasks.enqueue_task_sync("large", [200_000]), tasks.enqueue_task_sync("large", [50_000])
    assert ended(tasks, small.id)[0].result == b"x" * 50_000
    (failure,) = ended(tasks, large.id, status="FAILURE")
    assert failure.attempts == 1
    assert "store the data elsewhere" in failure.result
    tasks.shutdown()


def test_a_schedule_makes_its_tasks_once_for_all_consumers(tmp_path: Path) -> None:
    schedule = serve.tasks.TaskSchedule(task="note", every_s=1.0, args=["x"], catch_up_s=1.5)
    config = configured(tmp_path, schedules={"heart": schedule})
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    run(config, num_replicas=2)
    poll_for(lambda: len(MEETING.seen) >= 2)
    serve.delete("default")
    made = tasks.queue.tasks("q", TaskState.DONE, 100)
    assert len(made) == len(MEETING.seen)
    assert all(each.id == f"heart@{each.due_at:.0f}" for each in made)
    tasks.shutdown()


@each_case(
    ("arguments", "error", "text"),
    [
        ({"task_name": ""}, BadRequestError, "task_name"),
        ({"id": "x" * 201}, BadRequestError, "id is"),
        ({"priority": 101}, BadRequestError, "priority is 101"),
        ({"delay_s": -1}, BadRequestError, "delay_s is -1"),
        ({"delay_s": "soon"}, BadRequestError, "delay_s is 'soon'"),
        ({"at": datetime(2030, 1, 1)}, BadRequestError, "time zone"),
        ({"at": "noon"}, BadRequestError, "at is 'noon'"),
        ({"args": "one text"}, BadRequestError, "args is 'one text'; give a list"),
        ({"args": 5}, BadRequestError, "args is 5"),
        ({"kwargs": [1]}, BadRequestError, "kwargs is"),
        ({"kwargs": {1: 2}}, BadRequestError, "kwargs is {1: 2}"),
        ({"countdown": 5}, BadRequestError, "'countdown'"),
        ({"args": [threading.Lock()]}, UnpicklableError, "threading.Lock"),
    ],
)
def test_wrong_tasks_are_refused(
    arguments: dict[str, Any], error: type[Exception], text: str, tasks: SQLiteTaskProcessorAdapter
) -> None:
    with pytest.raises(error, match=text):
        tasks.submit_many([{"task_name": "work"}, {"task_name": "work", **arguments}])
    assert tasks.get_metrics_sync()["waiting"] == 0


def test_a_queue_that_cannot_be_opened_fails_the_deploy(tmp_path: Path) -> None:
    path = tmp_path / "tasks.sqlite"
    path.mkdir()

    with pytest.raises(DeployError, match="cannot consume its tasks"):
        run(configured(tmp_path))


class Direct(TaskProcessorAdapter):
    def __init__(self, config: serve.tasks.TaskProcessorConfig) -> None:
        super().__init__()
        self.handlers: dict[str, Any] = {}
        self.calls: list[str] = []
        MEETING.seen.append(self)

    def initialize(self, consumer_concurrency: int = 1) -> None:
        self.calls.append(f"initialize {consumer_concurrency}")

    def register_task_handle(self, func: Any, name: str | None = None) -> None:
        self.handlers[name or func.__name__] = func

    def enqueue_task_sync(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> serve.tasks.TaskResult:
        result = self.handlers[task_name](*args)
        return serve.tasks.TaskResult(id="1", status="SUCCESS", result=result)

    def get_task_status_sync(self, task_id: str) -> serve.tasks.TaskResult:
        raise NotImplementedError

    def cancel_task_sync(self, task_id: str) -> bool:
        return False

    def start_consumer(self, **kwargs: Any) -> None:
        self.calls.append("start")

    def stop_consumer(self, timeout: float = 10.0) -> None:
        self.calls.append("stop")
        raise RuntimeError("The broker does not answer.")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def get_metrics_sync(self) -> dict[str, Any]:
        return {}

    def health_check_sync(self) -> list[dict[str, Any]]:
        return []


class Doubles:
    @serve.tasks.task_handler
    async def double(self, x: int) -> int:
        return 2 * x

    @serve.tasks.task_handler
    def bad(self) -> None:
        raise ValueError("bad")


def no_adapter(config: serve.tasks.TaskProcessorConfig) -> str:
    return "adapter"


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ("math:pi", "adapter is 3.14.*give a class, or its import path"),
        (no_adapter, "it must return a TaskProcessorAdapter, not 'adapter'"),
    ],
)
def test_what_is_no_adapter_is_refused(adapter: Any, text: str) -> None:
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter=adapter)
    with pytest.raises(TypeError, match=text):
        serve.tasks.instantiate_adapter_from_config(config)


def test_an_adapter_of_the_users_runs_the_handlers() -> None:
    run(serve.tasks.TaskProcessorConfig(queue_name="q", adapter=Direct), Doubles, max_ongoing_requests=3)
    (adapter,) = MEETING.seen
    assert adapter.enqueue_task_sync("double", [4]).result == 8
    with pytest.raises(ValueError, match="bad"):
        adapter.enqueue_task_sync("bad", [])
    assert not adapter.supports_any_async()
    with pytest.raises(NotImplementedError, match="enqueue task without blocking"):
        asyncio.run(adapter.enqueue_task_async("double", [4]))
    serve.delete("default")
    assert adapter.calls == ["initialize 3", "start", "stop", "shutdown"]


def test_a_consumer_outside_of_an_instance_runs_functions(config: serve.tasks.TaskProcessorConfig) -> None:
    adapter = serve.tasks.instantiate_adapter_from_config(config)
    adapter.register_task_handle(lambda x: x + 1, "plain")

    async def double(x: int) -> int:
        return 2 * x

    adapter.register_task_handle(double)
    adapter.register_task_handle(bytes, "zeros")
    adapter.start_consumer()
    ids = [adapter.enqueue_task_sync(name, [4]).id for name in ("plain", "double")]
    assert [each.result for each in ended(adapter, *ids)] == [5, 8]
    large = adapter.enqueue_task_sync("zeros", [config.adapter_config.max_payload_bytes])
    (failure,) = ended(adapter, large.id, status="FAILURE")
    assert "store the data elsewhere" in failure.result
    adapter.stop_consumer()
    adapter.shutdown()


def _two_handlers() -> None:
    class Twice:
        @serve.tasks.task_handler(name="a")
        def one(self) -> None: ...

        @serve.tasks.task_handler(name="a")
        def two(self) -> None: ...

    serve.tasks.task_consumer(task_processor_config=serve.tasks.TaskProcessorConfig(queue_name="q"))(Twice)


def _no_handler() -> None:
    serve.tasks.task_consumer(task_processor_config=serve.tasks.TaskProcessorConfig(queue_name="q"))(dict)


@each_case(
    ("make", "error", "text"),
    [
        (_two_handlers, ValueError, "two handlers for tasks 'a'"),
        (_no_handler, ValueError, "dict has no handlers"),
        (lambda: serve.tasks.task_handler(name=" "), ValueError, "name is ' '"),
        (lambda: serve.tasks.task_consumer(task_processor_config={"queue_name": "q"}), TypeError, "dict"),
        (lambda: serve.tasks.TaskProcessorConfig(queue_name=""), ValueError, "queue_name"),
        (
            lambda: serve.tasks.TaskProcessorConfig(queue_name="q", failed_task_queue_name="q"),
            ValueError,
            "the queue itself",
        ),
        (lambda: serve.tasks.TaskSchedule(task="a"), ValueError, "needs cron or every_s"),
        (lambda: serve.tasks.TaskSchedule(task="a", cron="0 0 31 2 *"), ValueError, "never occurs"),
        (lambda: serve.tasks.TaskSchedule(task="a", cron="* * * * *", timezone="Mars"), ValueError, "Mars"),
        (lambda: serve.tasks.RedisAdapterConfig(url="http://x"), ValueError, "redis://"),
        (lambda: serve.tasks.SQLiteAdapterConfig(path="a/b"), ValueError, "absolute path"),
        (
            lambda: serve.tasks.SQLiteAdapterConfig(path="~nobody-has-this-name/b"),
            ValueError,
            "absolute path",
        ),
        (
            lambda: serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config={}).adapter_path,
            ValueError,
            "RedisAdapterConfig or CeleryAdapterConfig",
        ),
    ],
)
def test_wrong_definitions_are_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_the_module_of_ray_serve_is_the_decorator_too() -> None:
    from daskserve.schema import TaskProcessorConfig
    from daskserve.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

    assert serve.tasks.task_handler is task_handler
    assert serve.tasks.instantiate_adapter_from_config is instantiate_adapter_from_config

    class Work:
        @task_handler(name="w")
        def work(self) -> None: ...

    for decorator in (task_consumer, serve.tasks.task_consumer):
        assert decorator(task_processor_config=TaskProcessorConfig(queue_name="q"))(Work) is Work
