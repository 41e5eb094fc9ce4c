"""Continuous batches compared with fixed batches of the same model, and the cost of the engine alone.

The model uses numpy: a step multiplies the rows of up to 8 texts by one matrix, and takes hardly longer for 8
than for one. Texts have 5 to 200 tokens on a logarithmic scale, so most of them are short. (If all lengths
were equally likely, the steps of a fixed batch would be 57% full, so no engine could be more than 1.74 times
as fast.) Both kinds run in one process, without HTTP:

- tokens per second, and tokens per step, while 32 callers send one text after the other;
- the time to the first token while texts arrive at random, at 60% of the maximum rate of the fixed batch;
- with a model that does nothing, the CPU time of a step and of each request in it, compared with the wake-up
  of a task, which each output of an async engine needs.

Fixed and continuous take turns, and each ratio is the median of the ratios.

Run: ``python benchmarks/bench_continuous.py [--runs N] [--texts N] [--width N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

import daskserve as serve

SLOTS, LEAST, MOST = 8, 5, 200
CALLERS = 32


def length_of_text(rng: random.Random) -> int:
    return int(LEAST * (MOST / LEAST) ** rng.random() + 0.5)


class Model:
    """A matrix, and a row for each slot."""

    def __init__(self, width: int) -> None:
        rng = np.random.default_rng(1)
        self.matrix = (rng.standard_normal((width, width)) / width**0.5).astype(np.float32)
        self.rows = np.zeros((SLOTS, width), dtype=np.float32)
        self.steps = self.tokens = 0

    def begin(self, slot: int, seed: int) -> None:
        self.rows[slot] = seed % 7 / 7

    def step(self, slots: list[int]) -> list[int]:
        self.steps += 1
        self.rows[slots] = np.tanh(self.rows[slots] @ self.matrix)
        return [int(each) for each in self.rows[slots].argmax(axis=1)]

    @serve.batching.continuous_batch(max_slots=SLOTS)
    def continuous(self, active: list[serve.batching.ActiveRequest]) -> list[int]:
        tokens = self.step([each.slot for each in active])
        for each in active:
            if len(each.outputs) + 1 == each.args[0]:
                each.finish()
        return tokens

    @continuous.prefill
    def _prefill(self, new: list[serve.batching.ActiveRequest]) -> None:
        for each in new:
            self.begin(each.slot, each.args[0])

    @serve.batch(max_batch_size=SLOTS, batch_wait_timeout_s=0.01)
    async def fixed(self, lengths: list[int]) -> AsyncIterator[list[Any]]:
        slots = list(range(len(lengths)))
        for slot in slots:
            self.begin(slot, lengths[slot])
        for number in range(max(lengths)):
            tokens = await asyncio.to_thread(self.step, slots)
            yield [
                token if number < each else StopIteration for token, each in zip(tokens, lengths, strict=True)
            ]


class Idle:
    """A model that does nothing."""

    @serve.batching.continuous_batch(max_slots=64)
    def in_thread(self, active: list[serve.batching.ActiveRequest]) -> list[int]:
        return [1] * len(active)

    @serve.batching.continuous_batch(max_slots=64)
    async def on_loop(self, active: list[serve.batching.ActiveRequest]) -> list[int]:
        return [1] * len(active)


Generate = Callable[[int], Any]


async def throughput(generate: Generate, texts: int) -> tuple[float, int]:
    """Return the tokens per second of callers that send one text after the other, and the tokens."""
    rng = random.Random(1)
    lengths = [length_of_text(rng) for _ in range(texts)]
    total, began = sum(lengths), time.perf_counter()

    async def caller() -> None:
        while lengths:
            length = lengths.pop()
            count = 0
            async for _ in generate(length):
                count += 1
            assert count == length

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return total / (time.perf_counter() - began), total


async def first_tokens(generate: Generate, texts: int, rate: float) -> list[float]:
    """Return the times to the first token of texts that arrive at random."""
    rng, found = random.Random(2), []

    async def text(length: int) -> None:
        began = time.perf_counter()
        stream = generate(length)
        await anext(stream)
        found.append(time.perf_counter() - began)
        async for _ in stream:
            pass

    calls = []
    for _ in range(texts):
        await asyncio.sleep(rng.expovariate(rate))
        calls.append(asyncio.create_task(text(length_of_text(rng))))
    await asyncio.gather(*calls)
    return sorted(found)


async def overhead(function: Any, callers: int, steps: int) -> float:
    """Return the CPU time of a step, in microseconds."""

    async def caller() -> None:
        left = steps
        async for _ in function():
            left -= 1
            if not left:
                break

    before, began = function.stats().steps, time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    steps_made: int = function.stats().steps - before
    return (time.process_time() - began) / steps_made * 1e6


async def wake_up(count: int) -> float:
    """Return the CPU time in which asyncio wakes a task that waits for a future, in microseconds."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[None]] = []

    async def waiter() -> None:
        for _ in range(count):
            futures.append(loop.create_future())
            await futures[-1]

    tasks = [asyncio.create_task(waiter()) for _ in range(64)]
    began = time.process_time()
    for _ in range(count):
        await asyncio.sleep(0)
        present, futures[:] = list(futures), []
        for each in present:
            each.set_result(None)
    await asyncio.gather(*tasks)
    return (time.process_time() - began) / count / len(tasks) * 1e6


async def measure(runs: int, texts: int, width: int) -> None:
    rates, firsts = [], []
    for number in range(runs + 1):
        model = Model(width)
        results = []
        for each in (model.fixed, model.continuous):
            before = model.steps
            tokens_per_s, tokens = await throughput(each, texts)
            results.append((tokens_per_s, tokens / (model.steps - before)))
        fixed, continuous = results
        mean = (MOST - LEAST) / math.log(MOST / LEAST)
        times = [
            await first_tokens(each, texts, 0.6 * fixed[0] / mean) for each in (model.fixed, model.continuous)
        ]
        medians = [each[len(each) // 2] for each in times]
        p99s = [each[int(0.99 * len(each))] for each in times]
        if number:  # the first run is a warm-up
            rates.append((fixed[0], continuous[0], fixed[1], continuous[1]))
            firsts.append((*medians, *p99s))
    ratio = statistics.median(each[1] / each[0] for each in rates)
    last = rates[-1]
    print(
        f"tokens per second: {last[1]:.0f} beside {last[0]:.0f} of fixed batches, {ratio:.2f} times; "
        f"tokens per step: {last[3]:.1f} beside {last[2]:.1f}"
    )
    ratios = [each[1] / each[0] for each in firsts]
    ms = [1000 * each for each in firsts[-1]]
    print(
        f"time to the first token: median {ms[1]:.1f} ms beside {ms[0]:.1f}, "
        f"{statistics.median(ratios):.3f} times; p99 {ms[3]:.1f} ms beside {ms[2]:.1f}"
    )
    idle = Idle()
    for name, function in (("thread", idle.in_thread), ("loop", idle.on_loop)):
        one, many = [min([await overhead(function, n, 2000) for _ in range(runs)]) for n in (1, 64)]
        print(f"CPU time, steps in a {name}: {one:.0f} µs a step, {(many - one) / 63:.1f} µs a request")
    print(f"of which the wake-up of a task: {min([await wake_up(500) for _ in range(runs)]):.1f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    asyncio.run(measure(given.runs, given.texts, given.width))


if __name__ == "__main__":
    main()
