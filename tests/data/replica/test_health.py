"""When a replica counts as unhealthy, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from daskserve.common.clock import LoopClock
from daskserve.data.replica.health import HealthWatch
from daskserve.testing import run_virtual


def watch(probe: Callable[[], Awaitable[None]]) -> HealthWatch:
    return HealthWatch("b#1", probe, LoopClock(), period_s=5, timeout_s=10, threshold=3)


async def hang() -> None:
    await asyncio.get_running_loop().create_future()


async def first_unhealthy_s(health: HealthWatch) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    health.start()
    while health.is_healthy:  # noqa: ASYNC110 (health has no event, and time is virtual here)
        await asyncio.sleep(0.5)
    await health.stop()
    return loop.time() - began


def test_a_replica_that_hangs_is_found_within_45_s() -> None:
    async def main() -> None:
        assert 30 < await first_unhealthy_s(watch(hang)) <= 45

    run_virtual(main)


def test_a_probe_that_raises_is_found_after_three_periods() -> None:
    async def ill() -> None:
        raise RuntimeError("feverish")

    async def main() -> None:
        health = watch(ill)
        assert 14 < await first_unhealthy_s(health) <= 16
        assert health.facts() == {"is_healthy": False, "failures": 3, "detail": "feverish"}

    run_virtual(main)


def test_one_good_probe_forgives_the_bad_ones() -> None:
    outcomes = [False, False, True, False, False, True]

    async def moody() -> None:
        if not outcomes.pop(0):
            raise RuntimeError("bad")

    async def main() -> None:
        health = watch(moody)
        health.start()
        while outcomes:
            await asyncio.sleep(1)
            assert health.is_healthy
        await asyncio.sleep(0)
        assert health.facts()["failures"] == 0
        await health.stop()

    run_virtual(main)


def test_a_slow_probe_does_not_delay_the_next_ones() -> None:
    starts: list[float] = []

    async def slow() -> None:
        starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(4)

    async def main() -> None:
        health = watch(slow)
        health.start()
        await asyncio.sleep(21)
        await health.stop()
        assert [round(later - sooner, 6) for sooner, later in itertools.pairwise(starts)] == [
            5,
            5,
            5,
        ]

    run_virtual(main)


def test_a_single_check_has_a_deadline() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await watch(hang).check()

    run_virtual(main)


def test_a_watch_that_is_stopped_while_its_period_changes_probes_no_more() -> None:
    probes: list[float] = []

    async def slow() -> None:
        probes.append(asyncio.get_running_loop().time())
        try:
            await hang()
        finally:
            await asyncio.sleep(1)  # cancelled, it takes a while

    async def main() -> None:
        health = watch(slow)
        health.start()
        await asyncio.sleep(6)
        health.configure(1, 10, 3)
        await health.stop()
        await asyncio.sleep(60)
        assert len(probes) == 1

    run_virtual(main)
