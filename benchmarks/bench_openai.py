"""Tokens per second and the time to the first token through OpenAI's interface, beside other servers.

The model makes a token every 5 ms for each request, without any work, so what is measured is the server:
200 callers could get 40,000 tokens per second. Callers ask at once for streams of 100 tokens, each over a
connection of its own. The server has two workers, one with the proxy and OpenAI's interface, and one with
the model. The peers answer in the same form: Ray Serve with an ingress that reads the stream of a second
deployment, and LitServe with its ``OpenAISpec``. Systems take turns; figures are medians over the runs.

The peers need a separate environment: ``python -m venv DIR``, then ``DIR/bin/pip install "ray[serve]"
litserve``. Run: ``python benchmarks/bench_openai.py [--python DIR/bin/python] [--runs N] [--callers N ...]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from http_load import System, program, worker_processes

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize
from daskserve.openai import build_app

PEERS = Path(__file__).parent / "peers"
TOKENS = 100
TOKEN_S = 0.005
#: A token in a chunk: some text, not the empty one that comes with the role.
TOKEN = re.compile(rb'"content": ?"[^"]')


class Paced:
    """Makes tokens at a steady pace."""

    async def generate(self, request: Any) -> AsyncIterator[str]:
        for _ in range(request.max_tokens):
            await asyncio.sleep(TOKEN_S)
            yield "word "


class Stream(NamedTuple):
    """What one caller got: seconds to the first token, and the number of tokens."""

    first_s: float
    tokens: int


@contextmanager
def serving() -> Iterator[System]:
    """Serve the model in a second worker."""
    cluster: Any
    dask: Any
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    try:
        with serve.start(http_options={"port": 0, "location": "HeadOnly"}, dask_client=dask) as client:
            (proxy,) = [each.worker for each in client.status().actors if each.kind == "proxy"]
            other = next(each for each in dask.scheduler_info(n_workers=-1)["workers"] if each != proxy)
            deployment = {"actor_options": {"workers": [other]}, "max_ongoing_requests": 1000}
            client.run(build_app({"paced": {"engine": Paced, "deployment": deployment}}))
            yield System(client.http_urls()[0].rstrip("/"), worker_processes(dask))
    finally:
        dask.close()
        cluster.close()


async def ask(url: str) -> Stream:
    """Read a stream."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**20)
    message = {"role": "user", "content": "hello"}
    body = json.dumps({"model": "paced", "messages": [message], "stream": True, "max_tokens": TOKENS})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    writer.write((head + body).encode())
    seen, first_s = b"", 0.0
    while b"[DONE]" not in seen[-40:]:
        part = await reader.read(2**16)
        if not part:
            raise RuntimeError(f"the stream was cut: {seen[-300:]!r}")
        seen += part
        if not first_s and TOKEN.search(seen):
            first_s = time.perf_counter() - began
    writer.close()
    tokens = len(TOKEN.findall(seen))
    if tokens != TOKENS:
        raise RuntimeError(f"{tokens} tokens instead of {TOKENS}: {seen[:500]!r}")
    return Stream(first_s, tokens)


async def once(url: str, callers: int) -> tuple[float, float]:
    """Return tokens per second of all callers, and the median time to the first token."""
    began = time.perf_counter()
    streams = await asyncio.gather(*(ask(url) for _ in range(callers)))
    taken_s = time.perf_counter() - began
    return sum(each.tokens for each in streams) / taken_s, statistics.median(each.first_s for each in streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", help="interpreter of the environment with the peers")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32, 200])
    given = parser.parse_args()
    with ExitStack() as stack:
        systems = {"daskserve": stack.enter_context(serving())}
        if given.python:
            for name, file in {"Ray Serve": "ray_openai.py", "LitServe": "litserve_openai.py"}.items():
                systems[name] = stack.enter_context(program(PEERS / file, python=given.python))
        for callers in given.callers:
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in systems}
            for number in range(given.runs + 1):
                for name, system in systems.items():
                    before_s = system.cpu_s()
                    rate, first_s = asyncio.run(once(system.url, callers))
                    cpu_us = (system.cpu_s() - before_s) / (callers * TOKENS) * 1e6
                    if number:  # the first run is a warm-up
                        found[name].append((rate, first_s, cpu_us))
            for name, results in found.items():
                rate, first_s, cpu_us = (statistics.median(each) for each in zip(*results, strict=True))
                print(
                    f"{callers:4} callers  {name:10} {rate:7.0f} tokens/s   first token "
                    f"{first_s * 1e3:6.1f} ms   CPU per token {cpu_us:5.0f} µs",
                    flush=True,
                )


if __name__ == "__main__":
    main()
