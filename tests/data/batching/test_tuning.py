"""``batch(latency_target_s=...)``: sizes and waits that are found automatically, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from tables import each_case

from daskserve.common.clock import seeded_rng
from daskserve.data.batching.decorator import batch
from daskserve.data.batching.function import BatchedFunction
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.queue import BatchQueue
from daskserve.data.batching.tuning import BatchTuner, ServiceTimes
from daskserve.testing import run_virtual

TARGET_S = 0.25
#: Only calls between these times count.
WARM_S, END_S = 6.0, 30.0
#: The duration of a batch: a constant, and a time for each item.
FIXED_S, ITEM_S = 0.040, 0.002


@dataclass
class Outcome:
    """The result of a load: items per second, and the 99th percentile of their latencies."""

    rate: float
    p99_s: float


class Load:
    """Callers of a queue."""

    def __init__(self, queue: BatchQueue[int, int]) -> None:
        self.queue = queue
        self.loop = asyncio.get_running_loop()
        self.rng = seeded_rng(1)
        self.latencies: list[float] = []

    async def call(self) -> None:
        began = self.loop.time()
        await self.queue.submit(1)
        if began >= WARM_S and self.loop.time() <= END_S:
            self.latencies.append(self.loop.time() - began)

    async def client(self, think: Callable[[], float], begins: float = 0.0, ends: float = END_S) -> None:
        """Call repeatedly."""
        await asyncio.sleep(begins + 0.3 * self.rng.random())
        while self.loop.time() < ends:
            await asyncio.sleep(think())
            await self.call()

    async def clients(self, count: int, **options: float) -> None:
        await asyncio.gather(
            *(self.client(lambda: 0.004 * self.rng.random(), **options) for _ in range(count))
        )

    async def thinking(self, count: int, mean_s: float) -> None:
        await asyncio.gather(*(self.client(lambda: self.rng.expovariate(1 / mean_s)) for _ in range(count)))

    async def arrivals(self, rate: Callable[[float], float]) -> None:
        """Call at random times, at a rate that may change, without waiting for earlier calls."""
        calls = set()
        while self.loop.time() < END_S:
            await asyncio.sleep(self.rng.expovariate(rate(self.loop.time())))
            calls.add(asyncio.ensure_future(self.call()))
        await asyncio.gather(*calls)

    async def steps(self) -> None:
        await asyncio.gather(self.clients(6), self.clients(40, begins=10, ends=20))


#: Each load, and the rate of the best fixed size and wait with the same p99 (`search` finds it).
SHAPES: Mapping[str, tuple[Callable[[Load], Awaitable[None]], float]] = {
    "few clients": (lambda load: load.clients(8), 134.0),
    "many clients": (lambda load: load.clients(64), 370.7),
    "clients that think": (lambda load: load.thinking(32, 0.05), 201.4),
    "bursts": (lambda load: load.arrivals(lambda now: 300.0 if now % 2 < 0.5 else 30.0), 91.5),
    "waves": (lambda load: load.arrivals(lambda now: 120 + 100 * math.sin(now)), 122.8),
}


def simulate(
    shape: Callable[[Load], Awaitable[None]], limits: BatchLimits | None = None, noise: float = 0.0
) -> Outcome:
    """Run a load with fixed limits, or with a tuner."""
    latencies: Sequence[float] = ()

    async def main() -> None:
        nonlocal latencies
        rng = seeded_rng(2)
        tuner = BatchTuner(TARGET_S, BatchLimits(1000, TARGET_S)) if limits is None else None

        async def run(items: list[int]) -> list[int]:
            took_s = FIXED_S + ITEM_S * len(items)
            await asyncio.sleep(took_s * (1 + noise * rng.random()))
            return items

        used = limits if tuner is None else tuner.limits
        assert used is not None
        load = Load(BatchQueue(run, used, max_running=1, tuner=tuner))
        await shape(load)
        latencies = sorted(load.latencies)

    run_virtual(main)
    return Outcome(len(latencies) / (END_S - WARM_S), latencies[int(0.99 * len(latencies))])


def search(shape: Callable[[Load], Awaitable[None]], p99_s: float) -> float:
    """Return the highest rate of any fixed size and wait with this p99."""
    fixed = itertools.product((4, 8, 16, 32, 64, 128), (0.0, 0.01, 0.03, 0.06, 0.1, 0.15))
    outcomes = [simulate(shape, BatchLimits(size, wait_s)) for size, wait_s in fixed]
    return max(each.rate for each in outcomes if each.p99_s <= p99_s)


@pytest.mark.parametrize(
    "name",
    [each if each == "few clients" else pytest.param(each, marks=pytest.mark.nightly) for each in SHAPES],
)
def test_the_best_fixed_setting_is_hardly_better(name: str) -> None:
    shape, best = SHAPES[name]
    found = simulate(shape)
    assert found.rate >= 0.95 * best
    assert found.p99_s <= TARGET_S


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
def test_no_fixed_setting_that_a_search_finds_is_much_better(name: str) -> None:
    shape, known = SHAPES[name]
    found = simulate(shape)
    best = search(shape, TARGET_S)
    assert best == pytest.approx(known, rel=0.01)
    assert found.rate >= 0.95 * best


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
def test_noise_does_not_upset_it(name: str) -> None:
    shape, best = SHAPES[name]
    found = simulate(shape, noise=0.5)
    assert found.rate >= 0.75 * best  # batches take 1.25 times as long on average


@pytest.mark.nightly
def test_it_follows_the_load_and_gets_more_than_any_fixed_setting() -> None:
    # 6 clients, then 46, then 6: no fixed size is right for all three.
    assert simulate(Load.steps).rate >= 1.2 * 149.6


# ---- parts


@each_case("fixed_s, item_s", [(0.04, 0.002), (0.0, 0.01), (0.1, 0.0), (0.001, 0.0001)])
def test_service_times_are_a_line(fixed_s: float, item_s: float) -> None:
    times, rng = ServiceTimes(), random.Random(1)
    for size in (rng.randrange(1, 30) for _ in range(200)):
        times.add(size, fixed_s + item_s * size)
    for size in (1, 10, 100):
        assert times.predict(size) == pytest.approx(fixed_s + item_s * size, rel=0.01)
    if item_s:
        assert times.largest(fixed_s + item_s * 10) == pytest.approx(10, rel=0.02)
    # After a long time of equal sizes, it still knows the slope.
    for _ in range(2000):
        times.add(20, fixed_s + item_s * 20)
    assert times.predict(60) == pytest.approx(fixed_s + item_s * 60, rel=0.1)


def test_a_target_that_cannot_be_met_leaves_batches_of_a_useful_size() -> None:
    tuner = BatchTuner(0.01, BatchLimits(1000, 1.0))
    for size in (1, 2, 3, 4, 5, 6) * 20:
        tuner.started(size)
        tuner.ended(0.0, [0.0] * size, FIXED_S + ITEM_S * size, 0)
    assert 15 <= tuner.limits.max_batch_size <= 25  # twice as long as a single item
    assert tuner.limits.wait_s <= 0.01


def test_the_bounds_hold() -> None:
    bounds = BatchLimits(5, 0.001)
    tuner = BatchTuner(10.0, bounds)
    for number in range(1000):
        tuner.started(2)
        tuner.ended(number / 10, [0.0] * 2, 0.1, 90)
        assert tuner.limits.max_batch_size <= 5
        assert tuner.limits.wait_s <= 0.001
    bounds.max_batch_size = 7  # as `set_max_batch_size` does
    tuner.started(2)
    tuner.failed(2)
    tuner.started(2)
    tuner.ended(101.0, [0.0] * 2, 0.1, 90)
    assert tuner.limits.max_batch_size == 7


@each_case("max_running, expected", [(1, 6), (2, 3)])
def test_as_many_items_as_wait_for_each_running_batch_are_enough(max_running: int, expected: int) -> None:
    tuner = BatchTuner(10.0, BatchLimits(1000, 1.0), max_running)
    for number in range(100):
        tuner.started(6)
        tuner.ended(number / 10, [0.0] * 6, 0.1, 0)
    assert tuner.limits.enough == expected


# ---- the decorator


class Model:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    @batch(latency_target_s=0.2)
    async def double(self, items: list[int]) -> list[int]:
        self.sizes.append(len(items))
        await asyncio.sleep(0.01 + 0.001 * len(items))
        return [2 * each for each in items]

    @batch(latency_target_s=0.2, max_batch_size=4)
    async def bounded(self, items: list[int]) -> list[int]:
        self.sizes.append(len(items))
        return items


def test_the_decorator_tunes_each_instance() -> None:
    async def main() -> None:
        model = Model()

        async def client() -> None:
            for number in range(50):
                assert await model.double(number) == 2 * number

        await asyncio.gather(*(client() for _ in range(20)))
        assert max(model.sizes) == 20
        model.sizes.clear()
        await asyncio.gather(*(model.bounded(number) for number in range(20)))
        assert max(model.sizes) <= 4

    run_virtual(main)
    assert pickle.loads(pickle.dumps(Model.double)) is Model.double
    function, arguments = BatchedFunction.__reduce__(batch(latency_target_s=1)(client_function))  # type: ignore[misc]
    assert function(*arguments)._runner.latency_target_s == 1


async def client_function(items: list[int]) -> list[int]:
    return items


@each_case(
    "options, error",
    [
        ({"latency_target_s": 0}, ValueError),
        ({"latency_target_s": -1}, ValueError),
        ({"latency_target_s": "1"}, TypeError),
        ({"latency_target_s": True}, TypeError),
        ({"latency_target_s": 1, "batch_size_fn": sum}, ValueError),
    ],
)
def test_wrong_targets_are_refused(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match="latency_target_s"):
        batch(**options)  # type: ignore[call-overload]


def test_generators_have_no_target() -> None:
    async def generate(items: list[int]):  # type: ignore[no-untyped-def]
        yield items

    with pytest.raises(TypeError, match="is a generator"):
        batch(latency_target_s=1)(generate)
