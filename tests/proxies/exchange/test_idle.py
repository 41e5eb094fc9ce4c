from __future__ import annotations

import asyncio

from http_harness import advance, poll_for, timers

from daskserve.proxies.exchange.limits.idle import IdleWatch


async def test_items_are_reported_in_the_order_in_which_they_fell_silent() -> None:
    found: list[str] = []
    watch = IdleWatch(4, found.append)
    for item in ("a", "b", "c", "d"):
        watch.watch(item)
    advance(2)
    watch.watch("a")
    watch.unwatch("b")
    watch.unwatch("never seen")
    advance(2)
    await poll_for(lambda: found)
    assert found == ["c", "d"]
    assert len(watch) == 1
    advance(2)
    await poll_for(lambda: len(found) == 3)
    assert found == ["c", "d", "a"]


async def test_the_item_that_is_silent_for_longest_can_be_found() -> None:
    watch = IdleWatch[str](10, lambda _: None)
    assert watch.longest(0, bool) is None
    for item in ("a", "b", "c"):
        watch.watch(item)
        advance(1)
    watch.watch("a")
    assert watch.longest(2, bool) == "b"
    assert watch.longest(1, "c".__eq__) == "c"
    assert watch.longest(2, "c".__eq__) is None
    assert watch.longest(0, "d".__eq__) is None
    watch.stop()


async def test_the_watch_starts_again_after_it_was_empty() -> None:
    found: list[str] = []
    watch = IdleWatch(2, found.append)
    for item in ("a", "b"):
        watch.watch(item)
        advance(2)
        await poll_for(lambda: item in found)  # noqa: B023
    assert found == ["a", "b"]


async def test_nothing_is_reported_after_stop() -> None:
    found: list[str] = []
    before = timers(asyncio.get_running_loop())
    watch = IdleWatch(2, found.append)
    watch.watch("a")
    watch.stop()
    watch.watch("b")
    assert timers(asyncio.get_running_loop()) == before
    advance(3)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (found, len(watch)) == ([], 0)
