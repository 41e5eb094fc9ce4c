"""Routes with variables, from the client to user code, under both servers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import daskserve as serve
from daskserve.errors import AlreadyRegisteredError
from daskserve.testing import local_instance


async def details(request: Request) -> JSONResponse:
    scope = request.scope
    return JSONResponse({"params": request.path_params, "root": scope["root_path"], "path": scope["path"]})


def plain(request: Request) -> Any:
    return {"params": request.path_params, "url": request.url.path}


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    options = {"port": 0, "root_path": "/outside"}
    with local_instance(http_options=options) as client:
        application = Starlette(routes=[Route("/items/{number:int}", details)])
        client.deploy("application", application, route_prefix="/users/{name}")
        client.create_backend("plain", plain)
        client.create_endpoint("plain", backend="plain", route="/files/{path:path}")
        yield client


def fetch(client: serve.Client, path: str) -> Any:
    (url,) = client.http_urls()
    with urllib.request.urlopen(url + path, timeout=10) as reply:
        return json.load(reply)


def test_an_application_below_variables_sees_them_beside_its_own(client: serve.Client) -> None:
    assert fetch(client, "/outside/users/J%C3%B6/items/7?q=1") == {
        "params": {"name": "Jö", "number": 7},
        "root": "/outside/users/Jö",
        "path": "/outside/users/Jö/items/7",
    }


def test_a_plain_function_reads_path_params(client: serve.Client) -> None:
    assert fetch(client, "/files/a/b") == {"params": {"path": "a/b"}, "url": "/outside/files/a/b"}


def test_a_route_that_matches_the_same_paths_is_rejected(client: serve.Client) -> None:
    with pytest.raises(AlreadyRegisteredError, match=r"matches the paths of '/users/\{name\}'"):
        client.create_endpoint("other", backend="plain", route="/users/{id}")
    with pytest.raises(AlreadyRegisteredError, match=r"is registered there, as '/users/\{name\}'"):
        client.deploy("other", plain, route_prefix="/users/{id}")
