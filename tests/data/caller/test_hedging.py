"""Hedged requests: which requests get a second attempt, when, how often, and which attempt answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_router import CALL, GET, POST, Stage, quiet

from daskserve.common.types import Envelope, EnvelopeKind, Load, Message, Receive, Send
from daskserve.data.caller.request_routers.hedging import LEAST

pytestmark = pytest.mark.virtual_time

HEDGED = {"quantile": 0.95, "budget": 0.05, "min_delay_s": 0.0}
IDEMPOTENT = Envelope(EnvelopeKind.CALL, {"facts": {"idempotent": True}})
NO_BODY = Envelope(EnvelopeKind.HTTP, {"type": "http", "method": "GET"}, has_body=False)


class Answers:
    """A stage whose replicas answer after a time that the test sets, and the answers to their callers."""

    def __init__(self, took_s: Callable[[str], float], **more: Any) -> None:
        self.stage = Stage()
        self.backend = self.stage.backend(*(f"r{n}" for n in range(8)), concurrency=100, **more)
        self.took_s = took_s
        self.stage.replicas.handler = self.answer
        self.got: list[Any] = []

    async def answer(self, tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await asyncio.sleep(self.took_s(tag))
        await send({"type": "answer", "payload": tag})
        return Load()

    async def send(self, envelope: Envelope = IDEMPOTENT) -> float:
        """Send a copy of a request; return its duration."""

        def keep(message: Message) -> Awaitable[None]:
            self.got.append(message["payload"])
            return asyncio.sleep(0)

        async def receive() -> Message:
            return {}

        began = asyncio.get_running_loop().time()
        copy = Envelope(envelope.kind, envelope.head, has_body=envelope.has_body)
        await self.backend.send(copy, receive, keep)
        return asyncio.get_running_loop().time() - began

    @property
    def hedging(self) -> Any:
        return self.backend._waiting.hedging


async def tail(answers: Answers, count: int) -> tuple[float, float]:
    """Return the 99th percentile of latencies, and how often each request was sent."""
    rng, took = random.Random(3), []

    async def one() -> None:
        took.append(await answers.send())

    tasks = []
    for _ in range(count):
        await asyncio.sleep(rng.expovariate(200))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    assert len(answers.got) == count
    return sorted(took)[int(0.99 * count)], len(answers.stage.replicas.asked) / count


async def test_the_tail_is_cut_within_the_budget_and_the_slower_try_is_cancelled() -> None:
    rng, count = random.Random(1), 1000

    def slow_at_times(tag: str) -> float:
        return 1.0 if rng.random() < 0.02 else rng.uniform(0.005, 0.015)

    plain, once = await tail(Answers(slow_at_times), count)
    answers = Answers(slow_at_times, hedging=HEDGED)
    hedged, sent = await tail(answers, count)
    assert plain > 0.9
    assert once == 1
    assert hedged < 0.03  # the 95th percentile, and what a second attempt takes
    assert 1 < sent <= 1.05
    assert answers.hedging.won > count / 100
    assert len(answers.stage.replicas.cancelled) == round((sent - 1) * count)
    assert answers.backend.in_flight == 0
    assert not answers.hedging._tasks


async def test_a_deployment_that_is_slow_everywhere_gets_no_more_than_the_budget() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    for _ in range(100):
        await answers.send()
    answers.took_s = lambda _: 5.0
    answers.got.clear()
    answers.stage.replicas.asked.clear()
    assert (answers.hedging.won, answers.hedging.lost) == (0, 0), "none had a second attempt"
    _, sent = await tail(answers, 300)
    assert 1 < sent <= 1.05 + 5 / 300  # with what the first 100 have saved up


async def test_one_that_is_late_while_the_budget_is_spent_gets_its_second_attempt_later() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)
    answers.hedging._saved = 0.0
    answers.took_s = lambda _: 10.0
    late = []
    for _ in range(2):
        late.append(asyncio.create_task(answers.send()))
        await asyncio.sleep(0.25)
    answers.took_s = lambda _: 0.01
    assert len(answers.stage.replicas.asked) == 2
    for _ in range(18):  # with the late ones, the budget of one second attempt
        await answers.send()
    assert await asyncio.wait_for(asyncio.gather(*late[:1]), 0.1)  # that of the older one
    assert not late[1].done()
    for _ in range(20):
        await answers.send()
    await asyncio.wait_for(late[1], 0.1)


@pytest.mark.parametrize(
    ("saved", "begins_s"), [(9.0, 0.0101), (5.0, 0.0101), (2.5, 0.01515), (1.0, 0.01818)]
)
async def test_the_less_of_the_budget_is_left_the_later_a_second_attempt_begins(
    saved: float, begins_s: float
) -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)
    answers.hedging._saved = saved - 0.05  # which the request adds
    answers.took_s = lambda _: 9.0
    began = asyncio.get_running_loop().time()
    sending = asyncio.create_task(answers.send())
    while len(answers.stage.replicas.asked) < 2:  # noqa: ASYNC110  # no event tells
        await asyncio.sleep(0.0001)
    assert asyncio.get_running_loop().time() - began == pytest.approx(begins_s, abs=0.0003)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize("envelope", [CALL, POST, GET], ids=["call", "post", "with body"])
async def test_requests_that_must_not_run_twice_do_not(envelope: Envelope) -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    for _ in range(2 * LEAST):
        await answers.send()
    answers.took_s = lambda _: 9.0
    before = len(answers.stage.replicas.asked)
    assert await answers.send(envelope) == 9
    assert len(answers.stage.replicas.asked) == before + 1


async def warm(answers: Answers) -> None:
    """Let a stage measure the latency, and save a budget of second attempts."""
    for _ in range(3 * LEAST):
        await answers.send(NO_BODY)
    answers.got.clear()
    answers.stage.replicas.asked.clear()


async def test_the_second_attempt_goes_to_another_replica_and_a_failed_one_leaves_the_other() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)
    asked = answers.stage.replicas.asked

    async def fail_second(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if len(asked) == 2:
            raise ValueError("the second attempt")
        return await answers.answer(tag, envelope, receive, send)

    answers.stage.replicas.handler = fail_second
    answers.took_s = lambda _: 3.0
    assert await answers.send(NO_BODY) == 3
    assert len(set(asked)) == 2
    assert answers.got == asked[:1]


async def test_a_second_attempt_receives_an_empty_body_and_no_disconnect_while_the_client_stays() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)
    received: list[Message] = []

    async def stream(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Send five parts unless a message comes meanwhile, as Starlette does."""
        if len(answers.stage.replicas.asked) == 1:
            return await answers.answer(tag, envelope, receive, send)
        received.append(await receive())
        left = asyncio.ensure_future(receive())
        for number in range(5):
            await asyncio.sleep(0.1)
            if left.done():
                break
            await send({"type": "answer", "payload": number})
        left.cancel()
        return Load()

    answers.stage.replicas.handler = stream
    answers.took_s = lambda _: 30.0
    await answers.send(NO_BODY)
    assert received == [{"type": "http.request", "body": b"", "more_body": False}]
    assert answers.got == [0, 1, 2, 3, 4]


async def test_an_error_is_raised_at_once_without_a_second_attempt() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)

    async def fail(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        raise ValueError("broken")

    answers.stage.replicas.handler = fail
    with pytest.raises(ValueError, match="broken"):
        await answers.send()
    assert len(answers.stage.replicas.asked) == 1


async def test_a_caller_that_leaves_cancels_both_tries() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)
    answers.took_s = lambda _: 100.0
    task = asyncio.create_task(answers.send())
    await asyncio.sleep(1)
    assert answers.backend.in_flight == 2
    task.cancel()
    await quiet()
    assert answers.backend.in_flight == 0
    assert len(answers.stage.replicas.cancelled) == 2


async def test_a_request_that_still_waits_gets_no_second_attempt() -> None:
    answers = Answers(lambda _: 0.01, hedging=HEDGED)
    await warm(answers)
    answers.stage.publish("r0", concurrency=1, hedging=HEDGED)
    answers.took_s = lambda _: 10.0
    tasks = [asyncio.create_task(answers.send()) for _ in range(2)]
    await asyncio.gather(*tasks)
    assert answers.stage.replicas.asked == ["r0", "r0"]
