"""Deadlines: late work is cancelled or not begun, and raises the right error."""

from __future__ import annotations

import asyncio

import pytest

from daskserve.errors import RequestTimeoutError
from daskserve.loops.deadlines import earliest, until


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.virtual_time
async def test_work_in_time_returns_its_result() -> None:
    async def work() -> str:
        await asyncio.sleep(4.9)
        return "done"

    assert await until(5.0, work(), "late") == "done"


@pytest.mark.virtual_time
async def test_late_work_is_cancelled() -> None:
    cancelled_at = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled_at.append(now())
            raise

    with pytest.raises(RequestTimeoutError, match="late"):
        await until(5.0, work(), "late")
    assert cancelled_at == [5.0]


@pytest.mark.virtual_time
async def test_work_is_not_begun_after_its_deadline() -> None:
    async def work() -> None:
        raise AssertionError("begun")

    await asyncio.sleep(5)
    with pytest.raises(RequestTimeoutError, match="late"):
        await until(5.0, work(), "late")


@pytest.mark.virtual_time
async def test_errors_of_the_work_pass_through_including_timeouts() -> None:
    async def work() -> None:
        raise TimeoutError("the database")

    with pytest.raises(TimeoutError, match="the database") as info:
        await until(5.0, work(), "late")
    assert not isinstance(info.value, RequestTimeoutError)


@pytest.mark.parametrize(("outer", "inner", "winner"), [(5, 5, "outer"), (5, 6, "outer"), (6, 5, "inner")])
@pytest.mark.virtual_time
async def test_the_earliest_nested_deadline_counts_and_the_outermost_of_equal_ones(
    outer: float, inner: float, winner: str
) -> None:
    with pytest.raises(RequestTimeoutError, match=winner):
        await until(outer, until(inner, asyncio.sleep(60), "inner"), "outer")
    assert now() == 5
    await asyncio.sleep(0)  # no cancellation is pending


def test_earliest_ignores_missing_deadlines() -> None:
    assert earliest(None, 3.0, 2.0) == 2.0
    assert earliest(3.0, None) == 3.0
    assert earliest(None, None) is None
