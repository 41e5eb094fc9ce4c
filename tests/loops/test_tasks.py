"""Background tasks are kept, logged when they fail, and ended with their owner."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daskserve.loops.tasks import TaskSet
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
