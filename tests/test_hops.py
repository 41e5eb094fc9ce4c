"""Ways onto an event loop from other threads: one wake-up for many posts, none lost, all in order."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from daskserve.hops import Hop, Hops

DEADLINE_S = 10.0


def test_loops_that_were_closed_are_forgotten() -> None:
    hops = Hops()
    refs = []
    for _ in range(5):
        loop = asyncio.new_event_loop()
        assert hops.onto(loop) is hops.onto(loop)
        refs.append(weakref.ref(loop))
        loop.close()
        del loop
    gc.collect()
    assert sum(ref() is not None for ref in refs) == 1  # the last one, until there is another


@pytest.fixture
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_what_is_posted_soon_is_done_once_the_present_turn_is_over(
    other_loop: asyncio.AbstractEventLoop,
) -> None:
    done = threading.Event()
    hop = Hop(other_loop)

    async def main() -> None:
        hop.post_soon(done.set)
        assert not done.wait(0.05)  # this turn is not over
        await asyncio.to_thread(done.wait, DEADLINE_S)

    asyncio.run(main())
    assert done.is_set()


def test_a_post_does_not_wait_for_what_was_posted_soon(other_loop: asyncio.AbstractEventLoop) -> None:
    seen: list[int] = []
    done = threading.Event()
    hop = Hop(other_loop)

    async def main() -> None:
        hop.post_soon(seen.append, 1)
        hop.post(seen.append, 2)
        hop.post_soon(done.set)
        assert done.wait(DEADLINE_S)  # within this very turn

    asyncio.run(main())
    assert seen == [1, 2]


def test_nothing_is_lost_however_posts_are_mixed(other_loop: asyncio.AbstractEventLoop) -> None:
    hop = Hop(other_loop)
    seen: list[tuple[str, int]] = []

    async def post_soon() -> None:
        for number in range(2000):
            hop.post_soon(seen.append, ("soon", number))
            if number % 7 == 0:
                await asyncio.sleep(0)

    def post() -> None:
        for number in range(2000):
            hop.post(seen.append, ("at once", number))

    poster = threading.Thread(target=post)
    poster.start()
    asyncio.run(post_soon())
    poster.join()
    done = threading.Event()
    hop.post(done.set)
    assert done.wait(DEADLINE_S)
    for kind in ("soon", "at once"):
        assert [number for each, number in seen if each == kind] == list(range(2000))


def test_without_a_loop_of_its_own_whoever_posts_soon_posts_at_once(
    other_loop: asyncio.AbstractEventLoop,
) -> None:
    done = threading.Event()
    Hop(other_loop).post_soon(done.set)
    assert done.wait(DEADLINE_S)
