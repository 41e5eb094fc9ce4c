"""Posts to an event loop from other threads: one wake-up for many posts, none lost, all in order."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from cases import for_each

from daskserve.loops.thread_calls import MAX_DELAY_S, CallInbox, LoopQueues, ThreadCalls

DEADLINE_S = 10.0


def test_closed_loops_are_forgotten() -> None:
    loop_queues = LoopQueues()
    refs = []
    for _ in range(5):
        loop = asyncio.new_event_loop()
        assert loop_queues.get(loop) is loop_queues.get(loop)
        refs.append(weakref.ref(loop))
        loop.close()
        del loop
    gc.collect()
    assert sum(ref() is not None for ref in refs) == 1  # the last loop is kept until the next one


@pytest.fixture
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_post_soon_runs_after_the_current_loop_iteration(
    other_loop: asyncio.AbstractEventLoop,
) -> None:
    done = threading.Event()
    thread_calls = ThreadCalls(other_loop)

    async def main() -> None:
        thread_calls.post_soon(done.set)
        assert not done.wait(0.05)  # this loop iteration is not over
        await asyncio.to_thread(done.wait, DEADLINE_S)

    asyncio.run(main())
    assert done.is_set()


async def test_post_soon_does_not_wait_for_the_end_of_a_long_loop_iteration(
    other_loop: asyncio.AbstractEventLoop,
) -> None:
    thread_calls = ThreadCalls(other_loop)
    done = threading.Event()

    deadline = time.monotonic() + DEADLINE_S
    while not done.is_set():
        thread_calls.post_soon(done.set)
        assert time.monotonic() < deadline
        time.sleep(MAX_DELAY_S / 10)


def test_iterations_that_post_share_a_wake_up(
    other_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daskserve.loops.thread_calls.MAX_DELAY_S", 1000.0)
    seen: list[int] = []
    wake_ups: list[ThreadCalls] = []

    class CountingInbox(CallInbox):
        def wake_for(self, thread_calls: ThreadCalls) -> None:
            wake_ups.append(thread_calls)
            super().wake_for(thread_calls)

    thread_calls = ThreadCalls(other_loop, CountingInbox(other_loop))

    async def main() -> None:
        for number in range(0, 20, 2):
            thread_calls.post_soon(seen.append, number)
            thread_calls.post_soon(seen.append, number + 1)
            await asyncio.sleep(0)
        assert not wake_ups
        done = threading.Event()
        thread_calls.post_soon(done.set)
        assert await asyncio.to_thread(done.wait, DEADLINE_S)

    asyncio.run(main())
    assert seen == list(range(20))
    assert len(wake_ups) == 1


def test_a_post_does_not_wait_for_an_earlier_post_soon(other_loop: asyncio.AbstractEventLoop) -> None:
    seen: list[int] = []
    done = threading.Event()
    thread_calls = ThreadCalls(other_loop)

    async def main() -> None:
        thread_calls.post_soon(seen.append, 1)
        thread_calls.post(done.set)
        assert done.wait(DEADLINE_S)  # within this loop iteration

    asyncio.run(main())
    assert seen == [1]


def test_no_post_is_lost_when_both_kinds_are_mixed(other_loop: asyncio.AbstractEventLoop) -> None:
    thread_calls = ThreadCalls(other_loop)
    seen: list[tuple[str, int]] = []

    async def post_soon() -> None:
        for number in range(2000):
            thread_calls.post_soon(seen.append, ("soon", number))
            if number % 7 == 0:
                await asyncio.sleep(0)

    def post() -> None:
        for number in range(2000):
            thread_calls.post(seen.append, ("at once", number))

    poster = threading.Thread(target=post)
    poster.start()
    asyncio.run(post_soon())
    poster.join()
    done = threading.Event()
    thread_calls.post(done.set)
    assert done.wait(DEADLINE_S)
    for kind in ("soon", "at once"):
        assert [number for each, number in seen if each == kind] == list(range(2000))


def test_post_soon_from_a_thread_without_a_loop_posts_at_once(
    other_loop: asyncio.AbstractEventLoop,
) -> None:
    done = threading.Event()
    ThreadCalls(other_loop).post_soon(done.set)
    assert done.wait(DEADLINE_S)


class SleepingLoop(asyncio.AbstractEventLoop):
    """A loop that records its wake-ups and runs nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        self.calls.append(callback)

    call_soon = call_soon_threadsafe  # type: ignore[assignment]


def test_calls_with_one_inbox_share_its_wake_ups() -> None:
    loop = SleepingLoop()
    inbox = CallInbox(loop)
    one, other = ThreadCalls(loop, inbox), ThreadCalls(loop, inbox)
    seen: list[int] = []
    one.post(seen.append, 1)
    other.post(seen.append, 2)
    one.post(seen.append, 3)
    assert (len(loop.calls), seen) == (1, [])
    loop.calls.pop()()
    assert seen == [1, 3, 2]
    other.post(seen.append, 4)
    loop.calls.pop()()
    assert seen == [1, 3, 2, 4]


def test_catch_up_runs_arrived_posts_before_the_loop_wakes() -> None:
    loop = SleepingLoop()
    inbox = CallInbox(loop)
    thread_calls = ThreadCalls(loop, inbox)
    seen: list[int] = []

    def first() -> None:
        seen.append(1)
        thread_calls.post(seen.append, 3)

    thread_calls.post(first)
    thread_calls.post(seen.append, 2)
    inbox.catch_up()
    assert seen == [1, 2], "a post made meanwhile waits for the next wake-up"
    assert len(loop.calls) == 1, "the loop was already woken"
    loop.calls.pop()()
    assert seen == [1, 2, 3]
    inbox.catch_up()
    assert seen == [1, 2, 3]


def test_no_post_is_lost_during_catch_up() -> None:
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        inbox = CallInbox(loop)
        loop_queues = [ThreadCalls(loop, inbox) for _ in range(3)]
        ended = asyncio.Event()

        def post(poster: int) -> None:
            for number in range(5000):
                loop_queues[(poster + number) % 3 if poster == 3 else poster].post(
                    seen.append, (poster, number)
                )

        def post_end() -> None:
            for poster in posters:
                poster.join()
            loop_queues[0].post(ended.set)

        posters = [threading.Thread(target=post, args=(each,)) for each in range(4)]
        for each in (*posters, threading.Thread(target=post_end)):
            each.start()
        async with asyncio.timeout(DEADLINE_S):
            while not ended.is_set():
                inbox.catch_up()
                await asyncio.sleep(0)

    asyncio.run(main())
    for poster in range(3):
        assert [number for each, number in seen if each == poster] == list(range(5000))
    assert sorted(number for each, number in seen if each == 3) == list(range(5000))


def test_an_inbox_of_a_closed_loop_drops_posts() -> None:
    loop = asyncio.new_event_loop()
    inbox = CallInbox(loop)
    loop.close()
    for _ in range(2):
        ThreadCalls(loop, inbox).post(print)


@for_each("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_a_failing_call_does_not_block_calls_of_other_threads(error: type[BaseException]) -> None:
    loop = SleepingLoop()
    inbox = CallInbox(loop)
    one, other = ThreadCalls(loop, inbox), ThreadCalls(loop, inbox)
    seen: list[int] = []

    def fail() -> None:
        raise error

    one.post(fail)
    other.post(seen.append, 1)
    with suppress(KeyboardInterrupt):
        loop.calls.pop()()
    while loop.calls:
        loop.calls.pop()()
    other.post(seen.append, 2)
    while loop.calls:
        loop.calls.pop()()
    assert seen == [1, 2]
