"""Background tasks are kept, logged when they fail, and ended with their owner."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daskserve.loops.tasks import TaskSet, within
from daskserve.testing import run_virtual

logger = logging.getLogger("daskserve.test")


@pytest.mark.virtual_time
async def test_closing_cancels_the_tasks_and_waits_for_them() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append("cleaned up")

    tasks = TaskSet(logger)
    await tasks.close()
    task = tasks.spawn(work(), "work")
    assert task.get_name() == "daskserve-work"
    await asyncio.sleep(0)
    await tasks.close(timeout_s=0.5)
    assert ended == []
    await asyncio.wait([task])
    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["cleaned up"] * 2


def test_a_task_that_fails_is_logged_and_one_that_is_cancelled_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def scenario() -> None:
        tasks = TaskSet(logger)
        tasks.spawn(fail())
        tasks.spawn(asyncio.sleep(60))
        await asyncio.sleep(1)
        await tasks.close()

    run_virtual(scenario)
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("broken",)]  # type: ignore[union-attr]


@pytest.mark.virtual_time
async def test_work_has_a_time_and_keeps_its_result_and_its_errors() -> None:
    ended: list[str] = []

    async def work(takes_s: float, error: BaseException | None = None) -> str:
        for _ in range(2):
            if takes_s:
                try:
                    await asyncio.sleep(takes_s / 2)
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise
        if error is not None:
            raise error
        return "done"

    loop = asyncio.get_running_loop()
    for takes_s, found, spent_s in ((0, "done", 0), (0.8, "done", 0.8), (4, None, 1)):
        began = loop.time()
        assert await within(1, work(takes_s)) == found
        assert loop.time() - began == pytest.approx(spent_s)
    assert ended == ["cancelled"]
    for takes_s in (0, 0.8):
        with pytest.raises(TimeoutError, match="of the work"):
            await within(1, work(takes_s, TimeoutError("of the work")))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(within(10, work(4)), 1)
    assert ended == ["cancelled"] * 2
    done = loop.create_future()
    done.set_result(7)
    assert await within(1, done) == 7
