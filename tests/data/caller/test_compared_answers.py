"""Answers of copies are compared by code of the user's, which may hang or raise."""

from __future__ import annotations

import asyncio
import threading

from daskserve.data.caller.routing.shadow import Answer, AnswerComparer
from daskserve.payload.pickling import dump
from daskserve.testing import wait_until

released = threading.Event()


def hangs(old: object, new: object) -> bool:
    return released.wait(30)


class Unshown:
    """A value whose text cannot be made."""

    def __repr__(self) -> str:
        raise ValueError("no text")


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


async def test_a_difference_that_cannot_be_shown_counts() -> None:
    comparer, old = AnswerComparer(None), Answer()
    old.note({"type": "call.answer", "payload": dump(Unshown())})
    comparer.begin()
    await comparer.compare("call", old, Answer(), asyncio.create_task(asyncio.sleep(0)))
    assert (comparer.compared, comparer.different, comparer.failed) == (1, 1, 0)
    assert list(comparer.samples) == ["call: <Unshown> != []"]
