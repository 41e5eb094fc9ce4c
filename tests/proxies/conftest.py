"""Over which server the tests of this folder run that ask for one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from http_harness import SERVER_STATE, SERVER_STATES

from daskserve.proxies.server import hangup


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server_state" in metafunc.fixturenames:
        # The clock of uvloop cannot be moved.
        needs_asyncio = "advance(" in inspect.getsource(metafunc.function)
        only = getattr(metafunc.module, "SERVER", "")
        server_states = [
            each
            for each in SERVER_STATES
            if each.startswith(only) and not (needs_asyncio and each.endswith("uvloop"))
        ]
        metafunc.parametrize("server_state", server_states, indirect=True)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers find out sooner whether a client has left."""
    monkeypatch.setattr(hangup, "PERIOD_S", 0.01)
    monkeypatch.setattr(hangup, "SOON_S", 0.005)


@pytest.fixture
def server_state(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have `http_harness.serving` and `run` use one server, and one event loop, after the other."""
    token = SERVER_STATE.set(request.param)
    yield request.param
    SERVER_STATE.reset(token)
