"""The runner of a child process: a cancelled request ends when the child's code has ended."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

import pytest
from by_task import by_task

from daskserve.data.replica.process.runner import ChildRunner


class Child:
    """A child whose code ends, or whose verb fails, when the test requests it."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    async def call(self, verb: str, *, number: int) -> Any:
        assert (verb, number) == ("ended", 7)
        return await self.ended


class Listener:
    ends = 0

    def run_ended(self, value: Any, error: Exception | None) -> None:
        self.ends += 1

    def run_aborted(self, error: Exception) -> None:
        raise AssertionError("the run was cancelled, not aborted")


@by_task
async def hang(*args: Any) -> Any:
    await asyncio.Event().wait()


async def given_up(child: Child) -> tuple[ChildRunner, Listener]:
    """Return a runner with one cancelled request."""
    runner, listener = ChildRunner(child, None), Listener()  # type: ignore[arg-type]
    run = runner.start(hang, (7, None, None, None), Context(), listener)
    driving = asyncio.ensure_future(run.drive())
    await asyncio.sleep(0)
    driving.cancel()
    await asyncio.wait({driving})
    return runner, listener


def test_closing_waits_for_the_code_of_requests_that_were_given_up() -> None:
    async def scenario() -> None:
        child = Child()
        runner, listener = await given_up(child)
        closing = asyncio.create_task(runner.close())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not closing.done()
        assert (listener.ends, len(runner.runs)) == (0, 1)
        child.ended.set_result(None)
        await closing
        assert (listener.ends, len(runner.runs)) == (1, 0)

    asyncio.run(scenario())


def test_an_unexpected_error_of_the_child_ends_the_run_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        child = Child()
        runner, listener = await given_up(child)
        child.ended.set_exception(RuntimeError("odd answer"))
        await runner.close()
        assert (listener.ends, len(runner.runs)) == (1, 0)

    asyncio.run(scenario())
    [record] = caplog.records
    assert record.name == "daskserve.replica"
    assert "odd answer" in (record.exc_text or "")
