"""A program that ends does not wait for parts that never end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest
from distributed import Scheduler

from daskserve.client.instance.shutdown import END_S, end_instance
from daskserve.cluster.dask import quiet_close
from daskserve.cluster.dask.quiet_close import QuietCluster
from daskserve.loops.blocking import finish


async def test_a_local_cluster_that_does_not_close_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(self: Any) -> None:
        await asyncio.Event().wait()

    options = {"protocol": "inproc", "dashboard": False, "dashboard_address": "127.0.0.1:0", "port": 0}
    cluster = QuietCluster(scheduler={"cls": Scheduler, "options": options}, workers={}, asynchronous=True)
    await cluster
    with monkeypatch.context() as patch:
        patch.setattr(quiet_close, "CLOSE_S", 0.05)
        patch.setattr(QuietCluster, "_close", hang)
        await cluster.close()
    assert "did not close within 0.05 s" in caplog.text
    await cluster.close()


class Blocked:
    """A connection whose event loop no longer runs."""

    is_open = True

    def __init__(self) -> None:
        self.ended: list[str] = []

    def release_default(self, instance: str) -> None: ...

    def sync(self, coroutine: Coroutine[Any, Any, Any], *, timeout_s: float | None = None) -> None:
        coroutine.close()
        assert timeout_s == END_S
        raise TimeoutError

    async def instance_ended(self, instance: str, *, asynchronous: bool) -> None:
        self.ended.append(instance)


def test_an_instance_whose_connection_hangs_is_left(caplog: pytest.LogCaptureFixture) -> None:
    connection: Any = Blocked()
    with caplog.at_level(logging.WARNING):
        finish(end_instance(connection, "shop", asynchronous=False))
    assert "shop did not end within" in caplog.text
    assert connection.ended == ["shop"]
