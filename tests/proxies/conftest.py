"""The transports that the tests of this folder run on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from fuzzed_server import KINDS, FuzzedServer, fuzzed
from http_harness import SERVER_STATE, TRANSPORTS

from daskserve.proxies.server import hangup


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of sockets on each transport: those of a module with ``TRANSPORTS``."""
    transports = getattr(metafunc.module, "TRANSPORTS", None)
    if "server_state" in metafunc.fixturenames and transports is not None:
        if "advance(" in inspect.getsource(metafunc.function):  # the clock of uvloop cannot be moved
            transports = [each for each in transports if not each.endswith("uvloop")]
        metafunc.parametrize("server_state", transports, indirect=True)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers find out sooner whether a client has left."""
    monkeypatch.setattr(hangup, "PERIOD_S", 0.01)
    # What is written to clients whose data has ended would be in the responses of a busy machine.
    monkeypatch.setattr(hangup, "QUICK_S", 0.005)


@pytest.fixture
def server_state(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have `http_harness.serving` and `run` use a transport, and an event loop; Tornado if none is given."""
    token = SERVER_STATE.set(getattr(request, "param", TRANSPORTS[0]))
    yield SERVER_STATE.get()
    SERVER_STATE.reset(token)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FuzzedServer]:
    """Return a server that takes bytes from the test; in nightly runs over sockets, too."""
    with fuzzed(request.param) as server:
        yield server
