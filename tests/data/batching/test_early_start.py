"""Batches that do not wait for callers that cannot come: the decision, and its gain in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from daskserve.common.clock import seeded_rng
from daskserve.data.batching.early_start import REMEMBERED, VAIN, EarlyStart
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.queue import BatchQueue
from daskserve.testing import run_virtual

WAIT_S = 0.01
END_S = 3.0


class CountedSlots:
    """The slots of a replica whose requests are set by a test."""

    def __init__(self, ongoing: int = 0, concurrency: int = 100) -> None:
        self.ongoing = ongoing
        self.concurrency = concurrency

    def usage(self) -> tuple[int, int]:
        return self.ongoing, self.concurrency


def test_nothing_is_expected_once_all_slots_are_in_the_queue() -> None:
    early_start = EarlyStart(CountedSlots(4, 4).usage, "f")
    assert not early_start.has_all(3)
    assert early_start.has_all(4)


def test_the_first_batch_waits_and_later_ones_expect_as_many_calls_as_it_found() -> None:
    slots = CountedSlots(2)
    early_start = EarlyStart(slots.usage, "f")
    assert not early_start.has_all(2)
    early_start.ended(2)
    assert not early_start.has_all(1)
    assert early_start.has_all(2)
    slots.ongoing = 3  # one more is on its way
    assert not early_start.has_all(2)
    assert early_start.has_all(3)


def test_clients_that_left_are_forgotten() -> None:
    early_start = EarlyStart(CountedSlots(1).usage, "f")
    early_start.ended(5)
    for _ in range(REMEMBERED - 1):
        early_start.ended(1)
        assert not early_start.has_all(1)
    early_start.ended(1)
    assert early_start.has_all(1)


def test_a_wait_that_never_helps_is_logged_once_with_the_sizes(caplog: pytest.LogCaptureFixture) -> None:
    early_start = EarlyStart(CountedSlots().usage, "Model.f in deployment 'm'")
    with caplog.at_level(logging.WARNING, "daskserve.replica"):
        for _ in range(VAIN - 1):
            early_start.waited([0.01, 0.0099], 0.01, 32)
        early_start.waited([0.01, 0.005], 0.01, 32)  # this one helps
        for _ in range(VAIN - 1):
            early_start.waited([0.01, 0.0099], 0.01, 32)
        assert not caplog.records
        for _ in range(2 * VAIN):
            early_start.waited([0.01, 0.0099], 0.01, 32)
    (record,) = caplog.records
    for part in ("0.01 s of Model.f in deployment 'm'", f"last {VAIN} batches", "had 2 of 32 calls"):
        assert part in record.getMessage()


def test_calls_of_all_keys_count_when_one_joins_a_wait() -> None:
    async def run(items: list[int]) -> list[int]:
        return items

    async def main() -> None:
        now = asyncio.get_running_loop().time
        began = now()
        early_start = EarlyStart(CountedSlots(4, 4).usage, "f")
        queue: BatchQueue[int, int] = BatchQueue(run, BatchLimits(32, WAIT_S), early_start=early_start)
        calls = [asyncio.create_task(queue.submit(number, number)) for number in range(2)]
        await asyncio.sleep(WAIT_S / 4)
        calls += [asyncio.create_task(queue.submit(number, number)) for number in range(2)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert now() - began < WAIT_S / 2
        await asyncio.gather(*calls)

    run_virtual(main)


def load(
    clients: int, *, model_s: float, has_early_start: bool, think: Callable[[], float] = lambda: 0.0003
) -> tuple[float, float]:
    """Return the answers per second and the mean batch size for clients that call repeatedly."""
    sizes: list[int] = []

    async def main() -> None:
        slots = CountedSlots()
        loop = asyncio.get_running_loop()

        async def run(items: list[int]) -> list[int]:
            sizes.append(len(items))
            await asyncio.sleep(model_s)
            return items

        early_start = EarlyStart(slots.usage, "f") if has_early_start else None
        queue: BatchQueue[int, int] = BatchQueue(
            run, BatchLimits(32, WAIT_S), max_running=1, early_start=early_start
        )

        async def client() -> None:
            while loop.time() < END_S:
                await asyncio.sleep(think())
                slots.ongoing += 1
                await queue.submit(1)
                slots.ongoing -= 1

        await asyncio.gather(*(client() for _ in range(clients)))

    run_virtual(main)
    return sum(sizes) / END_S, sum(sizes) / len(sizes)


@pytest.mark.parametrize("model_s", [0.0005, 0.005])
@pytest.mark.parametrize("clients", [1, 16])
def test_a_batch_of_all_callers_does_not_wait(clients: int, model_s: float) -> None:
    rate, size = load(clients, model_s=model_s, has_early_start=True)
    assert rate >= 0.85 * clients / (model_s + 0.0003)
    assert size >= 0.95 * clients
    assert rate >= 1.9 * load(clients, model_s=model_s, has_early_start=False)[0]


def test_callers_that_come_at_random_lose_nothing() -> None:
    def answered(*, has_early_start: bool) -> tuple[float, float]:
        rng = seeded_rng(1)
        return load(
            16, model_s=0.005, has_early_start=has_early_start, think=lambda: rng.expovariate(1 / 0.05)
        )

    rate, size = answered(has_early_start=True)
    before, size_before = answered(has_early_start=False)
    assert rate >= 0.98 * before
    assert size >= 0.95 * size_before
