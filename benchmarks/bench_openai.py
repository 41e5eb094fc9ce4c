"""Tokens per second and the time to the first token through OpenAI's interface, compared with other servers.

The model produces a token every 5 ms for each request without computing anything, so only the server limits
the rate: 200 callers could get 40,000 tokens per second. For some seconds, each caller requests one stream of
100 tokens after another over its own connection. The server has two workers, one with the proxy and OpenAI's
interface, and one with the model. The peers have the same interface: Ray Serve with an ingress that reads the
stream of a second deployment, and LitServe with its ``OpenAISpec``. Systems take turns; results are medians
over the runs.

The peers need a separate environment: ``python -m venv DIR``, then ``DIR/bin/pip install "ray[serve]"
litserve``. Run: ``python benchmarks/bench_openai.py [--python DIR/bin/python] [--runs N] [--callers N ...]``.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from http_load import System, end_on_sigterm, worker_processes
from stream_load import Texts, compare, peers

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize
from daskserve.openai import build_app

TOKENS = 100
TOKEN_S = 0.005
#: A token in a chunk: a text that is not empty; the chunk with the role has an empty text.
TOKEN = re.compile(rb'"content": ?"[^"]')


class Paced:
    """Produces tokens at a constant rate."""

    async def generate(self, request: Any) -> AsyncIterator[str]:
        for _ in range(request.max_tokens):
            await asyncio.sleep(TOKEN_S)
            yield "word "


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


TEXTS = Texts(
    "/v1/chat/completions",
    count=lambda _: TOKENS,
    body=lambda count: {
        "model": "paced",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": count,
    },
    token=TOKEN,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", help="interpreter of the environment with the peers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32, 200])
    given = parser.parse_args()
    end_on_sigterm()
    programs = {"Ray Serve": "ray_openai.py", "LitServe": "litserve_openai.py"}
    with serving() as us, peers(programs, python=given.python) as others:
        systems = {"daskserve": us, **others}
        compare(systems, TEXTS, callers=given.callers, runs=given.runs, seconds=given.seconds)


if __name__ == "__main__":
    main()
