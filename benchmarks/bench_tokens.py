"""Streams of tokens over HTTP: continuous batches of daskserve beside the fixed ones of mosec.

The model sleeps for a step, as one on an accelerator would, and has 8 slots. Texts have 5 to 200 tokens: each
doubling of the length is as likely as the next. Callers send one text after the other and read server-sent
events. Measured: tokens per second, and the time from the request to the first token.

mosec needs a separate environment: ``python -m venv DIR``, then ``DIR/bin/pip install mosec``.
Run: ``python benchmarks/bench_tokens.py --python DIR/bin/python [--only WORD] [--seconds N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_load import Place, program, serving
from starlette.responses import StreamingResponse

import daskserve as serve

PEERS = Path(__file__).parent / "peers"
SLOTS, LEAST, MOST = 8, 5, 200


def make_writer(step_s: float) -> type:
    """Return the served class."""

    class Writer:
        @serve.continuous_batch(max_slots=SLOTS)
        def generate(self, active: list[Any]) -> list[str]:
            time.sleep(step_s)
            for each in active:
                if len(each.outputs) + 1 == each.args[0]:
                    each.finish()
            return ["data: token\n\n"] * len(active)

        async def __call__(self, request: Any) -> Any:
            count = (await request.json())["count"]
            return StreamingResponse(self.generate(count), media_type="text/event-stream")

    return Writer


class Caller:
    """Sends texts, and notes when their tokens arrive."""

    def __init__(self, url: str, rng: random.Random) -> None:
        place = urlsplit(url)
        assert place.hostname is not None
        self._host, self._port, self._path = place.hostname, place.port, place.path
        self._rng = rng
        self.tokens: list[float] = []
        self.firsts: list[float] = []

    async def run(self, until: float) -> None:
        while time.perf_counter() < until:
            await self._send(int(LEAST * (MOST / LEAST) ** self._rng.random() + 0.5))

    async def _send(self, count: int) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        body = json.dumps({"count": count}).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        began, found = time.perf_counter(), 0
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        try:
            while part := await reader.read(65536):
                arrived = part.count(b"token")
                if arrived and not found:
                    self.firsts.append(time.perf_counter() - began)
                found += arrived
                self.tokens += [time.perf_counter()] * arrived
        finally:
            writer.close()
        if found != count:
            raise RuntimeError(f"{found} tokens arrived, not {count}")


async def measure(url: str, callers: int, seconds: float) -> tuple[float, float, float]:
    """Return the tokens per second, and the median and the 99th percentile of the times to the first one."""
    began = time.perf_counter()
    all_callers = [Caller(url, random.Random(number)) for number in range(callers)]
    await asyncio.gather(*(each.run(began + seconds) for each in all_callers))
    tokens = sum(began + 1 <= at <= began + seconds for each in all_callers for at in each.tokens)
    firsts = sorted(first for each in all_callers for first in each.firsts)
    return tokens / (seconds - 1), firsts[len(firsts) // 2], firsts[int(0.99 * len(firsts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="interpreter of the environment with mosec; default: without it")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--step", type=float, default=0.005, help="seconds of a step")
    parser.add_argument("--only", default="", help="measure only the systems whose name contains this text")
    given = parser.parse_args()
    place = Place(hops=1, config={"max_concurrent_queries": 400})
    systems: dict[str, AbstractContextManager[Any]] = {"daskserve": serving(place, make_writer(given.step))}
    if given.python:
        systems["mosec"] = program(PEERS / "mosec_tokens.py", given.step, python=given.python)
    for name, system in systems.items():
        if given.only not in name:
            continue
        with system as running:
            for callers in (1, 32, 200):
                rate, median_s, p99_s = asyncio.run(measure(running.url, callers, given.seconds))
                print(
                    f"{name:10} {callers:4} callers: {rate:6.0f} tokens/s, first token after "
                    f"{1000 * median_s:.0f} ms, p99 {1000 * p99_s:.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
