"""The policy ``queue``: its decisions, and the polling of queue lengths."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from controller_harness import Stage, play
from tables import each_case
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

from daskserve.autoscaling import AutoscalingContext, Decision, Sample
from daskserve.autoscaling.autoscaler import Autoscaler
from daskserve.autoscaling.policies import load_policy
from daskserve.client.views.explanation import Explanation
from daskserve.common.clock import LoopClock
from daskserve.control.scaling.backlog import REPLY_TIMEOUT_S, Backlog
from daskserve.control.scaling.brokers import RabbitMQQueue, RedisQueue, open_queue
from daskserve.control.scaling.fetching import HTTPFetcher
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.queues import QueueOptions
from daskserve.testing import run_virtual

pytestmark = pytest.mark.smoke

SECRET = "s3cr3t"
KWARGS = {"broker_url": f"redis://:{SECRET}@h:6379/0", "queue_name": "tasks", "poll_interval_s": 10}
OPTIONS = QueueOptions(**KWARGS)  # type: ignore[arg-type]


def config(**options: Any) -> AutoscalingConfig:
    given = {"min_replicas": 0, "max_replicas": 20, "policy": "queue", "policy_kwargs": KWARGS}
    return AutoscalingConfig(**{**given, **options})


def wants(*samples: Sample, target: int, **options: Any) -> Decision:
    asked = config(**options)
    found = load_policy(asked)(AutoscalingContext("b", asked, 100.0, 0.0, target, target, samples))
    assert isinstance(found, Decision)
    return found


# ---- decisions


def test_the_number_is_tasks_plus_requests_divided_by_the_target() -> None:
    before = Sample(99.0, 2, 0, backlog=0.0)
    found = wants(before, Sample(100.0, 4, 1, backlog=11.0), target=2, target_ongoing_requests=5)
    assert found.replicas == 3
    assert (
        found.reason == "11 wait in queue 'tasks' and 3.5 requests ongoing or queued, 5 per replica wanted: 3"
    )
    assert wants(Sample(100.0, 0, 0, backlog=0.0), target=3).replicas == 0
    assert wants(Sample(100.0, 0, 0, backlog=5.0), target=0).replicas == 3
    assert wants(target=3) == Decision(3, "no metrics yet")


@each_case("running", [0.0, 9.0])
def test_an_unknown_length_removes_no_replica(running: float) -> None:
    found = wants(Sample(100.0, running, 0, backlog=None), target=3)
    assert found.replicas == (3 if running == 0 else 5)
    assert "the length of queue 'tasks' is unknown, so not fewer than 3" in found.reason


def test_a_schedule_can_bound_the_policy() -> None:
    kwargs = {"schedule": {"* * * * *": 2}, "policy": "queue", "policy_kwargs": KWARGS}
    above = config(policy="schedule", policy_kwargs=kwargs)
    assert above.queue_options() == OPTIONS
    found = load_policy(above)(
        AutoscalingContext("b", above, 100.0, 0.0, 2, 2, [Sample(100.0, 0, 0, backlog=8.0)])
    )
    assert found.replicas == 4
    assert config(policy="classic", policy_kwargs={}).queue_options() is None


# ---- damping


class Played:
    """An autoscaler that receives one sample per second."""

    def __init__(self, **options: Any) -> None:
        self.scaler = Autoscaler("b", config(**options))
        self.now = 0.0
        self.target = 0
        self.reason = ""

    def play(self, seconds: int, backlog: float | None, running: float = 0.0) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.scaler.observe(Sample(self.now, running, 0, backlog=backlog))
            step = self.scaler.step(now=self.now, wall=0.0, current=self.target, target=self.target)
            assert step.error is None
            self.target, self.reason = step.replicas, step.reason


def test_a_backlog_starts_the_first_replicas_at_once_and_keeps_them_until_it_is_gone() -> None:
    played = Played(downscale_delay_s=5, look_back_period_s=5, upscale_delay_s=3)
    played.play(30, 0.0)
    assert played.target == 0
    played.play(1, 6.0)
    assert played.target == 3
    played.play(3, 10.0)
    assert (played.target, "waiting 2 of 3 s" in played.reason) == (3, True)
    played.play(1, 10.0)
    assert played.target == 5
    played.play(60, 1.0)
    assert played.target == 1
    played.play(5, 0.0)
    assert (played.target, "before the last one stops" in played.reason) == (1, True)
    played.play(2, 0.0)
    assert played.target == 0


def test_an_unknown_length_does_not_count_as_idle() -> None:
    played = Played(downscale_delay_s=2, look_back_period_s=2)
    played.play(3, 1.0)
    played.play(60, None)
    assert played.target == 1
    played.play(4, 0.0)
    assert played.target == 0
    played.play(10, None)
    assert played.target == 0


# ---- polling


class ScriptedQueue:
    """A queue with scripted answers: a number, an error, or None for no answer."""

    def __init__(self) -> None:
        self.now: float | BaseException | None = 7.0
        self.reads = self.closes = 0
        self.close_error: Exception | None = None
        #: Whether a read answers when it is cancelled, as libraries do that cancel reads of their own.
        self.swallows = False

    async def read(self) -> float:
        self.reads += 1
        if isinstance(self.now, BaseException):
            raise self.now
        if self.now is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.swallows:
                    raise
                return 7.0
        assert isinstance(self.now, float)
        return self.now

    async def close(self) -> None:
        self.closes += 1
        if self.close_error is not None:
            raise self.close_error


def watched(scenario: Callable[[Backlog, ScriptedQueue], Any]) -> None:
    async def run() -> None:
        queue = ScriptedQueue()
        backlog = Backlog("b", OPTIONS, open_queue=lambda options: queue, clock=LoopClock())
        assert backlog.value() is None
        backlog.start()
        await asyncio.sleep(1.0)
        await scenario(backlog, queue)
        backlog.stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reads = queue.reads
        await asyncio.sleep(100.0)
        assert queue.reads == reads
        assert queue.closes >= 1

    run_virtual(run)


def test_a_length_is_polled_at_every_interval_and_valid_for_three_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(backlog: Backlog, queue: ScriptedQueue) -> None:
        assert (backlog.value(), backlog.problem) == (7.0, "")
        await asyncio.sleep(20.0)
        assert queue.reads == 3
        queue.now = OSError(f"Error 111 connecting to redis://:{SECRET}@h:6379")
        await asyncio.sleep(29.0)
        assert (backlog.value(), queue.reads) == (7.0, 5)
        assert backlog.problem == ("queue 'tasks' cannot be read: Error 111 connecting to redis://***@h:6379")
        await asyncio.sleep(2.0)
        assert backlog.value() is None
        queue.now = 0.0
        await asyncio.sleep(10.0)
        assert (backlog.value(), backlog.problem) == (0.0, "")

    caplog.set_level(logging.INFO, "daskserve.autoscaling")
    watched(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert SECRET not in caplog.text


def test_each_kind_of_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(backlog: Backlog, queue: ScriptedQueue) -> None:
        for error in (OSError("one"), ValueError("two"), OSError("one"), RuntimeError("three")) * 3:
            queue.now = error
            await asyncio.sleep(10.0)
            assert str(error) in backlog.problem

    watched(scenario)
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["one", "two", "three"]


def test_polling_ends_even_if_a_library_swallows_its_cancellation() -> None:
    async def scenario(backlog: Backlog, queue: ScriptedQueue) -> None:
        queue.now, queue.swallows = None, True
        await asyncio.sleep(10.0 + REPLY_TIMEOUT_S / 2)  # in the middle of a read

    watched(scenario)


def test_a_broker_that_does_not_answer_is_disconnected_and_polled_again() -> None:
    async def scenario(backlog: Backlog, queue: ScriptedQueue) -> None:
        queue.now = None
        await asyncio.sleep(10.0 + REPLY_TIMEOUT_S)
        assert backlog.problem == "queue 'tasks' cannot be read: the broker has not answered for 5 s"
        assert queue.closes == 1
        queue.now = 3.0
        await asyncio.sleep(10.0)
        assert backlog.value() == 3.0

    watched(scenario)


def test_an_error_while_closing_does_not_end_polling() -> None:
    async def scenario(backlog: Backlog, queue: ScriptedQueue) -> None:
        queue.now, queue.close_error = OSError("away"), OSError("broken")
        await asyncio.sleep(30.0)
        assert backlog.problem.endswith("away")
        queue.now = 3.0
        await asyncio.sleep(10.0)
        assert backlog.value() == 3.0

    watched(scenario)


@each_case("number", [-1.0, float("nan"), float("inf")])
def test_an_invalid_length_is_an_error(number: float) -> None:
    async def scenario(backlog: Backlog, queue: ScriptedQueue) -> None:
        queue.now = number
        await asyncio.sleep(10.0)
        assert backlog.problem.endswith(f"the broker reports a length of {number}")

    watched(scenario)


# ---- in a controller

QUICK: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "policy": "queue",
    "downscale_delay_s": 5.0,
    "look_back_period_s": 5.0,
}


def with_queue(kwargs: dict[str, Any] = KWARGS, **options: Any) -> dict[str, Any]:
    return {**QUICK, "policy_kwargs": kwargs, **options}


def test_a_controller_polls_the_queue_until_the_backend_is_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = ScriptedQueue()
    opened: list[QueueOptions] = []

    def open_scripted(options: QueueOptions, fetch: Any, tasks: object) -> ScriptedQueue:
        opened.append(options)
        return queue

    async def scenario(stage: Stage) -> None:
        async def explained() -> str:
            return str(Explanation.of(await stage.call("explain", name="b")))

        queue.now = 0.0
        await stage.create(autoscaling_config=with_queue())
        await stage.clock.sleep(30.0)
        assert len(stage.running) == 0
        queue.now = 6.0
        began = stage.clock.now()
        await stage.until(lambda: len(stage.running) == 3)
        assert stage.clock.now() - began <= 10.0 + 1.0 + stage.start_s + 0.05
        assert "6 in the broker's queue" in await explained()
        # Changes of other options keep the last known length.
        await stage.update(autoscaling_config=with_queue(downscale_delay_s=6.0))
        assert opened == [OPTIONS]
        queue.now = OSError("away")
        await stage.clock.sleep(60.0)
        assert len(stage.running) == 3
        assert "unknown in the broker's queue" in await explained()
        assert "so not fewer than 3" in await explained()
        assert "queue 'tasks' cannot be read: away" in await explained()
        queue.now = 0.0
        await stage.until(lambda: not stage.running)
        await stage.update(autoscaling_config=with_queue({**KWARGS, "queue_name": "other"}))
        await stage.clock.sleep(1.5)
        assert [each.queue_name for each in opened] == ["tasks", "other"]
        closes = queue.closes
        await stage.delete()
        await stage.clock.sleep(20.0)
        reads = queue.reads
        assert queue.closes == closes + 1
        await stage.clock.sleep(100.0)
        assert queue.reads == reads
        assert SECRET not in f"{await stage.call('status')}"

    monkeypatch.setattr("daskserve.control.scaling.scaler.open_queue", open_scripted)
    caplog.set_level(logging.DEBUG, "daskserve")
    play(scenario)
    assert "queue 'tasks' cannot be read: away" in caplog.text
    assert SECRET not in caplog.text


# ---- the brokers


def test_the_scheme_selects_the_broker() -> None:
    async def fetch(url: str, login: tuple[str, str]) -> bytes:
        raise AssertionError("nothing is asked yet")

    for url in ("redis://h", "rediss://h", "unix:///run/redis.sock"):
        assert isinstance(open_queue(QueueOptions(url, "q"), fetch), RedisQueue)
    for url in ("amqp://h", "amqps://h", "pyamqp://h"):
        assert isinstance(open_queue(QueueOptions(url, "q"), fetch), RabbitMQQueue)


def test_without_the_package_redis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("daskserve.control.scaling.brokers.importlib.import_module", missing)
    with pytest.raises(ValueError, match=r'pip install "daskserve\[redis\]"'):
        asyncio.run(RedisQueue(OPTIONS).read())


def ask_rabbitmq(body: bytes | BaseException, url: str = "amqp://u:p%2F@h/v%2F1", name: str = "a/b") -> Any:
    asked: list[Any] = []

    async def fetch(address: str, login: tuple[str, str]) -> bytes:
        asked.append((address, login))
        if isinstance(body, BaseException):
            raise body
        return body

    found = asyncio.run(RabbitMQQueue(QueueOptions(url, name), fetch).read())
    assert asked == [("http://h:15672/api/queues/v%2F1/a%2Fb", ("u", "p/"))]
    return found


def test_rabbitmq_counts_waiting_and_unacknowledged_tasks() -> None:
    body = {"name": "a/b", "messages": 7, "messages_ready": 5, "messages_unacknowledged": 2}
    assert ask_rabbitmq(json.dumps(body).encode()) == 7


@each_case(
    ("body", "message"),
    [
        (b'{"error": "Object Not Found", "reason": "Not Found"}', "no queue 'a/b' in the virtual host 'v/1'"),
        (b'{"error": "not_authorised", "reason": "Login failed"}', "refuses the username or the password"),
        (b'{"error": "x"}', "refuses the request"),
        (b'{"name": "a/b"}', "does not report the number of messages"),
        (b'{"messages": "7"}', "does not report the number of messages"),
        (b'{"messages": true}', "does not report the number of messages"),
        (b"[]", "does not report the number of messages"),
        (b"<html>", "not RabbitMQ's management API"),
        (b"\xff", "not RabbitMQ's management API"),
    ],
)  # fmt: skip
def test_any_other_answer_of_rabbitmq_is_an_error_with_a_remedy(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ask_rabbitmq(body)
    assert "p/" not in str(caught.value)


def test_credentials_are_sent_to_their_address_only() -> None:
    seen: list[tuple[str, str | None]] = []

    class Answer(RequestHandler):
        def get(self) -> None:
            seen.append((self.request.path, self.request.headers.get("Authorization")))
            if self.request.path == "/elsewhere":
                self.redirect("/here")
            else:
                self.write({"messages": 1})

    async def scenario() -> None:
        server = HTTPServer(Application([("/.*", Answer)]))
        sock, port = bind_unused_port()
        server.add_socket(sock)
        fetch = HTTPFetcher()
        try:
            base = f"http://127.0.0.1:{port}"
            assert json.loads(await fetch(f"{base}/here", ("u", "p"))) == {"messages": 1}
            with pytest.raises(OSError, match="HTTP 302"):
                await fetch(f"{base}/elsewhere", ("u", "p"))
            assert json.loads(await fetch(f"{base}/elsewhere")) == {"messages": 1}
        finally:
            fetch.close()
            server.stop()
            await server.close_all_connections()

    asyncio.run(scenario())
    assert seen == [
        ("/here", "Basic dTpw"),
        ("/elsewhere", "Basic dTpw"),
        ("/elsewhere", None),
        ("/here", None),
    ]
