"""Errors whose classes define methods: these run in threads, and for a limited time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from runs import until

from daskserve.data.replica.execution import error_packing
from daskserve.data.replica.execution.error_packing import ErrorPackers
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.payload.packed_errors import PackedError

DEADLINE_S = 10.0
WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Stuck(Exception):
    """Creating its text takes until ``resume`` is set."""

    resume = threading.Event()

    def __str__(self) -> str:
        self.resume.wait(DEADLINE_S)
        return "late"


class Unpicklable(Stuck):
    """Its text is created at once, but pickling it takes until ``resume`` is set."""

    def __str__(self) -> str:
        return "in time"

    def __reduce__(self) -> Any:
        return self.resume.wait(DEADLINE_S)


class Where(Exception):
    def __str__(self) -> str:
        return f"{threading.current_thread().name} {WHO.get()}"


def run(scenario: Callable[[ErrorPackers], Awaitable[None]], timeout_s: float) -> None:
    async def main() -> None:
        packers = ErrorPackers("errors", ThreadCalls(asyncio.get_running_loop()), timeout_s)
        Stuck.resume.clear()
        try:
            await scenario(packers)
        finally:
            Stuck.resume.set()
            assert await packers.close(DEADLINE_S)

    asyncio.run(main())


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as found:
        return found


def pack(packers: ErrorPackers, error: Exception) -> asyncio.Future[PackedError]:
    return packers.pack(raised(error), contextvars.copy_context())


@pytest.mark.parametrize(
    ("kind", "summary"),
    [(Stuck, "Stuck: <its text was not made in time>"), (Unpicklable, "Unpicklable: in time")],
)
def test_an_error_that_takes_too_long_arrives_with_what_is_known(kind: type[Stuck], summary: str) -> None:
    async def scenario(packers: ErrorPackers) -> None:
        error = kind("x", 3)
        error.code = 7  # type: ignore[attr-defined]
        packed = await pack(packers, error)
        assert packed.summary == summary
        assert "in raised" in packed.text
        found = packed.load()
        assert (type(found), found.args, found.code) == (kind, ("x", 3), 7)  # type: ignore[attr-defined]

    run(scenario, timeout_s=0.05)


def test_errors_behind_others_that_are_stuck_get_their_turn() -> None:
    async def scenario(packers: ErrorPackers) -> None:
        stuck = [pack(packers, Stuck()) for _ in range(3 * error_packing.THREADS)]
        waiting = asyncio.create_task(asyncio.wait(stuck))
        while not waiting.done():
            assert (await pack(packers, Where())).summary  # whether in time or not
        assert (await pack(packers, Where())).summary.startswith("Where: errors-")

    run(scenario, timeout_s=0.05)


def test_no_more_threads_are_stuck_than_allowed() -> None:
    async def scenario(packers: ErrorPackers) -> None:
        await asyncio.wait([pack(packers, Stuck()) for _ in range(100)])
        names = [each.name for each in threading.enumerate() if each.name.startswith("errors-")]
        assert len(names) <= error_packing.THREADS + error_packing.MAX_STUCK

    run(scenario, timeout_s=0.02)


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_text_is_made_in_the_codes_context_and_not_on_the_workers_loop(
    event_loop: str, waits: bool
) -> None:
    async def main() -> None:
        async def fail() -> None:
            WHO.set("the code")
            if waits:
                await asyncio.sleep(0)
            raise Where

        executor = UserExecutor("b", contextvars.copy_context(), event_loop=event_loop)
        with pytest.raises(PackedError, match=r"^Where: daskserve-b-errors-0 the code$"):
            await executor.run_async(fail)
        assert await executor.close(DEADLINE_S)
        await until(lambda: not executor.runs)

    asyncio.run(main())
