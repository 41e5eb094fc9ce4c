"""Time from the end of a replica's constructor to its first request, on real processes under load."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from clusters import Load, nannied_cluster

import daskserve as serve

#: The documented 100 ms, plus a margin for a busy machine.
FIRST_REQUEST_S = 0.1 + 0.9
REPLICAS = 4


class RecordsItsStart:
    """Records when it was ready, and when its first request arrived."""

    def __init__(self) -> None:
        self._ready_at = time.monotonic()
        self._asked_after_s: float | None = None

    async def __call__(self, request: Any) -> str:
        if self._asked_after_s is None:
            self._asked_after_s = time.monotonic() - self._ready_at
        await asyncio.sleep(0.02)  # long enough that one replica cannot take the load
        return f"{serve.get_current_replica_tag()} {self._asked_after_s}"


@pytest.mark.nightly
def test_new_replicas_get_requests_at_once() -> None:
    with nannied_cluster(2) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        client.create_backend("b", RecordsItsStart, config={"max_concurrent_queries": 2})
        client.create_endpoint("e", backend="b", route="/e")
        handle = client.get_handle("e")

        def ask() -> tuple[str, float]:
            tag, waited_s = handle.remote().result(timeout_s=10).split()
            return tag, float(waited_s)

        first, _ = ask()
        with Load(client.http_urls()[0], connections=8) as load:
            client.update_backend_config("b", {"num_replicas": REPLICAS})
            load.more(200)
        assert load.failures == []
        waits_s: dict[str, float] = {}
        while len(waits_s) < REPLICAS:
            waits_s |= [ask()]
        del waits_s[first]
        assert max(waits_s.values()) < FIRST_REQUEST_S, waits_s
