"""Functions that proxies and the controller call when they start."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import dask.config
import httpx
import pytest
from starlette.middleware import Middleware

from daskserve.errors import BadRequestError
from daskserve.testing import local_instance


class AddHeader:
    def __init__(self, app: Any, value: str) -> None:
        self.app = app
        self.value = value

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def add(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-added", self.value.encode())]
            await send(message)

        await self.app(scope, receive, add)


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with functions that records which of them were called."""
    module: Any = ModuleType("site_callbacks")
    module.called = []
    module.add = lambda: [Middleware(AddHeader, value="callback")]
    module.note = lambda: module.called.append("controller")
    module.wrong = lambda: ["no middleware"]
    module.fail = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "site_callbacks", module)
    return module


def test_a_proxy_adds_the_middlewares_of_its_callback_outside_of_the_others(callbacks: Any) -> None:
    options = {"port": 0, "middlewares": [Middleware(AddHeader, value="option")]}
    with local_instance(http_options={**options, "proxy_callback": "site_callbacks:add"}) as client:
        answer = httpx.get(client.http_urls()[0] + "/-/routes")
        assert answer.headers.get_list("x-added") == ["option", "callback"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrong", r"proxy_callback='site_callbacks:wrong' must return a list of .*\['no middleware'\]"),
        ("fail", "proxy_callback='site_callbacks:fail' failed: ZeroDivisionError"),
        ("missing", "proxy_callback='site_callbacks:missing' failed: .*has no 'missing'"),
    ],
)
def test_a_wrong_callback_fails_the_start(callbacks: Any, name: str, text: str) -> None:
    with pytest.raises(BadRequestError, match=text):
        with local_instance(http_options={"port": 0, "proxy_callback": f"site_callbacks:{name}"}):
            pass


def test_the_controller_calls_its_callback_once_when_it_starts(callbacks: Any) -> None:
    with dask.config.set({"daskserve.controller.callback": "site_callbacks.note"}):
        with local_instance() as client:
            assert client.list_backends() == {}
    assert callbacks.called == ["controller"]


def test_an_unknown_setting_of_the_controller_is_named() -> None:
    with dask.config.set({"daskserve.controller.calback": "x"}):
        with pytest.raises(ValueError, match=r"daskserve\.controller\.calback, which is not an option"):
            with local_instance():
                pass
