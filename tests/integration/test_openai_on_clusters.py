"""OpenAI's interface on real processes: a replica of a model is killed in the middle of streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from clusters import nannied_cluster, pids

import daskserve as serve
from daskserve.openai import build_app

#: Maximum duration of a stream; a stream that takes longer hangs.
PATIENCE_S = 40.0
STREAMS = 200


class Slow:
    """Yields four tokens per second."""

    async def generate(self, request: Any) -> AsyncIterator[str]:
        for _ in range(request.max_tokens):
            await asyncio.sleep(0.25)
            yield "word "


async def read(
    client: httpx.AsyncClient,
    url: str,
    count: int,
    *,
    leaves: bool = False,
    begun: Callable[[], object] = bool,
) -> str:
    """Return how a stream ends: ``done``, an error's code, or ``left`` if the caller leaves after a token."""
    message = {"role": "user", "content": "x"}
    body = {"model": "slow", "messages": [message], "stream": True, "max_tokens": count}
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return str(answer.json()["error"]["code"])
        lines = []
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                if not lines:
                    begun()
                    if leaves:
                        return "left"
                lines.append(line[6:])
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    return str(last["error"]["code"]) if "error" in last else "done"


@pytest.mark.nightly
def test_a_model_killed_in_the_middle_of_200_streams_ends_each_with_an_error_that_says_so() -> None:
    with nannied_cluster(4) as dask:
        client = serve.start(dask_client=dask, http_options={"port": 0, "location": "HeadOnly"})
        busy = {each.worker for each in client.status().actors}
        free = [each for each in pids(dask) if each not in busy][:2]
        deployment = {"num_replicas": 2, "max_ongoing_requests": 400, "actor_options": {"workers": free}}
        client.run(build_app({"slow": {"engine": Slow, "deployment": deployment}}))
        url = f"{client.http_urls()[0]}/v1/chat/completions"

        async def ask_all() -> list[str]:
            limits = httpx.Limits(max_connections=STREAMS)
            begun = asyncio.Semaphore(0)
            async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http:
                streams = [read(http, url, 40, begun=begun.release) for _ in range(STREAMS)]
                tasks = [asyncio.ensure_future(each) for each in streams]
                async with asyncio.timeout(PATIENCE_S):
                    for _ in range(STREAMS):
                        await begun.acquire()
                kill_a_model(client, pids(dask))
                async with asyncio.timeout(PATIENCE_S):
                    return await asyncio.gather(*tasks)

        ends = asyncio.run(ask_all())
        assert set(ends) <= {"done", "unavailable"}
        assert "unavailable" in ends
        assert "done" in ends
        client.shutdown()


def kill_a_model(client: serve.Client, by_worker: Any) -> None:
    """Kill a worker that has a replica of the model, but not the server."""
    replicas = [each for each in client.status().actors if each.kind == "replica"]
    server = {each.worker for each in replicas if "OpenAIServer" in each.name}
    victim = next(each.worker for each in replicas if "slow" in each.name and each.worker not in server)
    os.kill(by_worker[victim], signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.limit_s(240)
def test_a_model_takes_requests_again_after_1000_streams_of_which_many_were_refused_or_left() -> None:
    with nannied_cluster(2) as dask:
        client = serve.start(dask_client=dask, http_options={"port": 0, "location": "HeadOnly"})
        options = {"num_replicas": 1, "max_ongoing_requests": 100, "max_queued_requests": 200}
        client.run(build_app({"slow": {"engine": Slow, "deployment": options}}))
        url = f"{client.http_urls()[0]}/v1/chat/completions"

        async def main() -> tuple[list[str], list[str]]:
            async with AsyncExitStack() as stack:
                # The client searches all of its connections for each request.
                https = [await stack.enter_async_context(httpx.AsyncClient(timeout=150)) for _ in range(50)]
                async with asyncio.timeout(200):
                    many = [read(https[n % 50], url, 4, leaves=not n % 3) for n in range(1000)]
                    ends = await asyncio.gather(*many)
                    return ends, await asyncio.gather(*(read(https[n], url, 1) for n in range(50)))

        ends, afterwards = asyncio.run(main())
        assert {"done", "left", "overloaded"} == set(ends)
        assert set(afterwards) == {"done"}
        client.shutdown()
