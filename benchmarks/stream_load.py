"""Shared parts of the benchmarks of streams of tokens: callers, and systems that take turns.

A measurement ends after a fixed time, even if a system is slow: callers are cut off in the middle of their
streams. If a caller has no first token by then, its waiting time so far counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_load import System, program

PEERS = Path(__file__).parent / "peers"

#: Tokens count only after this time since the start of the callers.
WARM_S = 1.0
#: Time limit for a system to respond again once all callers have ended.
SETTLE_S = 60.0


@dataclass(frozen=True)
class Texts:
    """The request of callers: the path, the number of tokens, the body for it, and the form of a token."""

    path: str
    count: Callable[[random.Random], int]
    body: Callable[[int], Mapping[str, Any]]
    token: re.Pattern[bytes]


@dataclass(frozen=True)
class Result:
    """Tokens per second of all callers, seconds to the first token, and microseconds of CPU per token."""

    rate: float
    first_s: float
    first_p99_s: float
    cpu_us: float


@dataclass
class Caller:
    """Requests one text after the other, each over its own connection."""

    url: str
    texts: Texts
    rng: random.Random
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            await self.read(self.texts.count(self.rng))

    async def read(self, count: int) -> None:
        place = urlsplit(self.url)
        body = json.dumps(self.texts.body(count)).encode()
        head = (
            f"POST {place.path.rstrip('/') + self.texts.path or '/'} HTTP/1.1\r\nHost: {place.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        began, found, rest, seen = time.perf_counter(), 0, b"", b""
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(head.encode() + body)
            while found < count:
                part = await reader.read(2**16)
                if not part:
                    raise RuntimeError(f"{found} tokens arrived, not {count}: {seen[:500]!r}")
                seen = seen or part
                lines, newline, rest = (rest + part).rpartition(b"\n")
                arrived = len(self.texts.token.findall(lines + newline))
                if arrived and not found:
                    self.firsts.append(time.perf_counter() - began)
                found += arrived
                self.tokens += arrived
        finally:
            if not found:
                self.firsts.append(time.perf_counter() - began)
            writer.close()


async def measure(system: System, texts: Texts, callers: int, seconds: float) -> Result:
    """Return the results of callers within a time; raise a caller's error, or `TimeoutError`."""
    everyone = [Caller(system.url, texts, random.Random(number)) for number in range(callers)]
    tasks = [asyncio.ensure_future(each.run()) for each in everyone]
    try:
        await asyncio.sleep(WARM_S)
        before, before_cpu_s, began = (
            sum(each.tokens for each in everyone),
            system.cpu_s(),
            time.perf_counter(),
        )
        failed, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in failed:
            task.result()
        tokens, taken_s = sum(each.tokens for each in everyone) - before, time.perf_counter() - began
        cpu_s = system.cpu_s() - before_cpu_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(SETTLE_S):
        await Caller(system.url, texts, random.Random(0)).read(1)
    firsts = sorted(first for each in everyone for first in each.firsts)
    p99_s = firsts[int(0.99 * len(firsts))]
    return Result(tokens / taken_s, statistics.median(firsts), p99_s, cpu_s / max(1, tokens) * 1e6)


@contextmanager
def peers(
    files: Mapping[str, str], *arguments: object, python: str | None, only: str = ""
) -> Iterator[dict[str, System]]:
    """Run the programs of other systems, if there is an interpreter for them; report failed starts."""
    with ExitStack() as stack:
        found = {}
        for name, file in files.items() if python else ():
            if only in name:
                try:
                    found[name] = stack.enter_context(program(PEERS / file, *arguments, python=str(python)))
                except RuntimeError as error:
                    print(f"without {name}: {error}", flush=True)
        yield found


def compare(
    systems: Mapping[str, System], texts: Texts, *, callers: Sequence[int], runs: int, seconds: float
) -> None:
    """Print the medians of each system's runs for each number of callers; systems take turns."""
    for count in callers:
        found: dict[str, list[Result]] = {name: [] for name in systems}
        faults: dict[str, str] = {}
        for _ in range(runs):
            for name, system in systems.items():
                try:
                    found[name].append(asyncio.run(measure(system, texts, count, seconds)))
                except (OSError, RuntimeError, TimeoutError) as error:
                    faults[name] = repr(error)
        for name, results in found.items():
            if results:
                print(f"{count:4} callers  {name:10} {_line(results)}", flush=True)
            if name in faults:
                print(f"{count:4} callers  {name:10} has failed in one of {runs} runs: {faults[name]}")


def _line(results: Sequence[Result]) -> str:
    rate, first_s, p99_s, cpu_us = (
        statistics.median(getattr(each, name) for each in results)
        for name in ("rate", "first_s", "first_p99_s", "cpu_us")
    )
    return (
        f"{rate:7.0f} tokens/s   first token {first_s * 1e3:6.1f} ms, p99 {p99_s * 1e3:6.0f} ms   "
        f"CPU per token {cpu_us:5.0f} µs"
    )
