"""The transports for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop
from fuzzed_server import KINDS, FuzzedServer, fuzzed
from http_harness import TRANSPORT

from daskserve.proxies.server import disconnects


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers detect sooner that a client has left."""
    monkeypatch.setattr(disconnects, "PERIOD_S", 0.01)
    # On a busy machine, the bytes that are written to test a half-closed client would be in the responses.
    monkeypatch.setattr(disconnects, "QUICK_S", 0.005)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let `http_harness.serving` and `run` use a transport and an event loop."""
    token = TRANSPORT.set(request.param)
    yield request.param
    TRANSPORT.reset(token)


@pytest.fixture
def loop_factory(transport: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory for tests that are coroutine functions; None for asyncio's default."""
    return uvloop.new_event_loop if transport.endswith("uvloop") else None


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FuzzedServer]:
    """Return a server that gets bytes from the test; in nightly runs, also over sockets."""
    with fuzzed(request.param) as server:
        yield server
