"""Metrics of handle calls in the process that makes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import daskserve as serve
from daskserve.telemetry.histogram import HistogramCounts
from daskserve.testing import local_instance


def answer(request: Any) -> Any:
    if request.data is None:
        raise KeyError("nothing")
    return request.data


def series(client: serve.Client) -> dict[tuple[str, ...], float]:
    connection: Any = client._connection.cluster_connection
    routers = connection.cluster(client.instance_name).shared["routers"]
    return {
        (name, *labels[1:]): value.count if isinstance(value, HistogramCounts) else value
        for name, labels, value in routers.samples()
    }


def test_calls_errors_and_durations_are_counted_by_endpoint() -> None:
    with local_instance() as client:
        client.create_backend("b", answer)
        client.create_endpoint("e", backend="b")
        client.create_endpoint("unused", backend="b")
        handle = client.get_handle("e")
        assert handle.remote(1).result(5) == 1
        assert asyncio.run(awaited(handle)) == 2
        with pytest.raises(KeyError):
            handle.remote(None).result(5)
        found = series(client)
        assert found[("handle_requests", "e")] == 3
        assert found[("handle_request_duration_seconds", "e")] == 3
        assert found[("handle_errors", "e", "user_code")] == 1
        assert found[("router_requests", "b")] == 3
        assert not any("unused" in key for key in found)
        client.delete_endpoint("e")
        assert not any(key[0].startswith("handle") for key in series(client))


def never(request: Any) -> Any:
    held.wait(10)


held = threading.Event()


def test_cancelled_calls_are_counted_apart_from_timeouts() -> None:
    held.clear()
    with local_instance() as client:
        client.create_backend("b", never)
        client.create_endpoint("e", backend="b")
        handle = client.get_handle("e")
        try:
            with pytest.raises(serve.errors.RequestTimeoutError):
                handle.options(timeout_s=0.05).remote().result(5)
            response = handle.remote()
            poll(lambda: series(client)[("handle_requests", "e")] == 2)
            response.cancel()
            poll(lambda: series(client).get(("handle_errors", "e", "cancelled")) == 1)
            assert series(client)[("handle_errors", "e", "timeout")] == 1
        finally:
            held.set()


def poll(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError


async def awaited(handle: serve.Handle) -> Any:
    return await handle.remote(2)
