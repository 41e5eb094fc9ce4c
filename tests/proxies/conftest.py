"""The transports that the tests of this folder run on."""

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
    """Have servers find out sooner whether a client has left."""
    monkeypatch.setattr(disconnects, "PERIOD_S", 0.01)
    # What is written to clients whose data has ended would be in the responses of a busy machine.
    monkeypatch.setattr(disconnects, "QUICK_S", 0.005)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have `http_harness.serving` and `run` use a transport, and an event loop."""
    token = TRANSPORT.set(request.param)
    yield request.param
    TRANSPORT.reset(token)


@pytest.fixture
def loop_factory(transport: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the event loop of a test that is a coroutine function; None for asyncio's own."""
    return uvloop.new_event_loop if transport.endswith("uvloop") else None


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FuzzedServer]:
    """Return a server that takes bytes from the test; in nightly runs over sockets, too."""
    with fuzzed(request.param) as server:
        yield server
