"""Answers of copies are compared by a function of the user's, which may hang."""

from __future__ import annotations

import asyncio
import threading

from daskserve.data.caller.routing.shadow import Answer, AnswerComparer
from daskserve.testing import wait_until

released = threading.Event()


def hangs(old: object, new: object) -> bool:
    return released.wait(30)


async def test_a_comparison_that_hangs_is_reported_while_it_hangs() -> None:
    released.clear()
    comparer = AnswerComparer(f"{__name__}:hangs", slow_s=0.01)
    copy = asyncio.create_task(asyncio.sleep(0))
    comparer.begin()
    comparing = asyncio.create_task(comparer.compare("call", Answer(), Answer(), copy))
    try:
        await wait_until(lambda: comparer.trouble)
        assert (comparer.compared, comparer.failed) == (0, 1)
        assert comparer.trouble == f"{__name__}:hangs has not returned for 0.01 s"
    finally:
        released.set()
    await comparing
    assert (comparer.compared, comparer.failed) == (0, 1)
