"""Virtual time: exact, deterministic, with errors for deadlocks and livelocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest
from tables import each_case

import daskserve as serve
from daskserve.common.clock import LoopClock
from daskserve.errors import ReplicaStartError
from daskserve.options.http import HTTPOptions
from daskserve.testing import (
    DeadlockError,
    LivelockError,
    VirtualTimeLoop,
    local_instance,
    local_instance_async,
    run_virtual,
    wait_until,
)


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- the loop


def test_time_starts_at_zero_and_passes_only_for_timers() -> None:
    async def scenario() -> list[float]:
        times = [now()]
        for delay_s in (0, 0.1, 3600, 1e-3):
            await asyncio.sleep(delay_s)
            times.append(now())
        return times

    began = time.monotonic()
    assert run_virtual(scenario) == [0.0, 0.0, 0.1, 3600.1, 3600.1 + 1e-3]
    assert time.monotonic() - began < 5


@pytest.mark.virtual_time
async def test_a_timer_fires_at_its_time_to_the_last_bit() -> None:
    """If it fired a rounding error early, `while now < deadline: wait(deadline - now)` would never end."""
    loop = asyncio.get_running_loop()
    for number in range(1, 400):
        when = now() + number / 7
        arrived = loop.create_future()
        loop.call_at(when, arrived.set_result, None)
        await arrived
        assert now() == when


def test_a_program_takes_the_same_course_every_time() -> None:
    async def worker(name: int, trace: list[tuple[float, int]]) -> None:
        for turn in range(5):
            await asyncio.sleep((name * 7 + turn * 3) % 5 / 10)
            trace.append((now(), name))

    async def scenario() -> list[tuple[float, int]]:
        trace: list[tuple[float, int]] = []
        await asyncio.gather(*(worker(name, trace) for name in range(10)))
        return trace

    first = run_virtual(scenario)
    assert run_virtual(scenario) == first
    assert first == sorted(first, key=lambda each: each[0])


def test_timeouts_and_the_loop_clock_work_in_virtual_time() -> None:
    async def scenario() -> float:
        clock = LoopClock()
        with pytest.raises(TimeoutError):
            await clock.wait_for(asyncio.Event().wait(), 60)
        await clock.sleep(1)
        return clock.now()

    assert run_virtual(scenario) == 61


def test_a_deadlock_error_names_the_waiting_tasks() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        await asyncio.sleep(5)
        await asyncio.create_task(wait_for_nothing(), name="the-one-that-waits")

    with pytest.raises(DeadlockError, match="deadlock: nothing is scheduled") as info:
        run_virtual(scenario)
    assert "the-one-that-waits at " in str(info.value)
    assert "test_testing.py:" in str(info.value)


def test_an_endless_loop_is_a_livelock() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110  # the fault under test
            await asyncio.sleep(0)

    async def tick() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(5)

    with pytest.raises(LivelockError, match="time stood still at 0 s"):
        run_virtual(spin)
    with pytest.raises(LivelockError, match="past 100 s"):
        run_virtual(tick, limit_s=100)


def test_virtual_time_waits_for_a_thread_in_real_time() -> None:
    go = threading.Event()

    def work() -> str:
        go.wait(5)
        return "done"

    async def scenario() -> tuple[str, float]:
        tick = asyncio.create_task(asyncio.sleep(10))
        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        go.set()
        result = await working
        tick.cancel()
        return result, now()

    assert run_virtual(scenario) == ("done", 0.0)


def test_errors_and_results_are_passed_on_and_nothing_is_left() -> None:
    before = set(threading.enumerate())

    async def scenario(value: int) -> int:
        asyncio.create_task(asyncio.sleep(1e6))  # noqa: RUF006  # cancelled at the end, as asyncio.run does
        if value < 0:
            raise ValueError(value)
        return value

    assert run_virtual(scenario, 7) == 7
    with pytest.raises(ValueError, match="-1"):
        run_virtual(scenario, -1)
    assert set(threading.enumerate()) <= before


def test_the_loop_works_as_a_runner_loop_factory() -> None:
    async def scenario() -> float:
        await asyncio.sleep(30)
        return now()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(scenario()) == 30
        assert runner.run(scenario()) == 60


# ---- waiting for a condition


@each_case("run", [run_virtual, lambda function: asyncio.run(function())])
def test_wait_until_waits_for_a_condition(
    run: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
) -> None:
    async def scenario() -> None:
        found: list[str] = []
        asyncio.get_running_loop().call_later(0.02, found.append, "it")
        assert await wait_until(lambda: found) == ["it"]

        def never() -> bool:
            return False

        with pytest.raises(TimeoutError, match=r"never did not become true within 0\.01 s"):
            await wait_until(never, timeout_s=0.01)

    run(scenario)


# ---- an instance in one process


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def __call__(self, request: Any) -> int:
        self.count += 1
        return self.count


def test_a_local_instance_serves_by_handle() -> None:
    before = set(threading.enumerate())
    with local_instance() as client:
        client.create_backend("counter", Counter, 10)
        client.create_endpoint("counter", backend="counter")
        handle = client.get_handle("counter")
        assert [handle.remote().result(5) for _ in range(3)] == [11, 12, 13]
        assert client.http_urls() == []
        with pytest.raises(ReplicaStartError, match="constructor"):
            client.create_backend("broken", Counter, timeout_s=5)
        assert list(client.list_backends()) == ["counter"]
    assert set(threading.enumerate()) <= before


def test_the_functions_of_the_package_use_the_local_instance_of_their_block() -> None:
    hello = serve.deployment("builtins.repr", name="hello").bind()
    with local_instance(http_options={"port": 0}) as outer:
        assert serve.run(hello).remote("x").result() == "'x'"
        assert list(outer.status().applications) == list(serve.status().applications) == ["default"]
        with local_instance() as inner:
            serve.run(hello, name="inner")
            assert list(inner.status().applications) == ["inner"]
        with serve.connect() as client:
            assert client.http_urls() == outer.http_urls()
        assert serve.get_app_handle().remote(1).result() == "1", "the block of connect() has ended nothing"
    assert serve.status().instance == ""


async def test_the_functions_of_the_package_use_the_local_instance_of_their_async_block() -> None:
    async with local_instance_async() as client:
        handle = await serve.run_async(serve.deployment("builtins.repr", name="hello").bind())
        assert await handle.remote(1) == "1"
        assert list((await client.status()).applications) == ["default"]


def test_backends_of_a_local_instance_call_each_other() -> None:
    with local_instance() as client:
        client.create_backend("double", lambda request: 2 * request.data)
        client.create_endpoint("double", backend="double")
        inner = client.get_handle("double")

        async def outer(request: Any) -> int:
            return 1 + int(await inner.remote(request.data))

        client.create_backend("outer", outer)
        client.create_endpoint("outer", backend="outer")
        assert client.get_handle("outer").remote(20).result(5) == 41


@each_case("server", ["tornado", "asyncio", "uvicorn"])
def test_a_local_instance_serves_http_if_enabled(server: Literal["tornado", "asyncio", "uvicorn"]) -> None:
    httpx = pytest.importorskip("httpx")
    with local_instance(http_options=HTTPOptions(port=0, server=server)) as client:
        client.create_backend("hello", lambda request: "hello")
        client.create_endpoint("hello", backend="hello", route="/hello")
        (url,) = client.http_urls()
        assert httpx.get(f"{url}/hello").text == "hello"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/hello")


def test_an_unknown_server_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"server\n.*'tornado', 'asyncio' or 'uvicorn'.*hypercorn"):
        with local_instance(http_options={"port": 0, "server": "hypercorn"}):
            pass
