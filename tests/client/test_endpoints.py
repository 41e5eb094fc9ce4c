"""Endpoints by name, from creation to deletion."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from cases import for_each

import daskserve as serve
from daskserve.client.definitions.specs import check_endpoint_name, check_name
from daskserve.errors import BadRequestError, ServeError
from daskserve.testing import local_instance

NAME = "team/model/v1"


def echo(request: Any) -> Any:
    return request.query_params["q"]


def fetch(client: serve.Client, path: str) -> str:
    (url,) = client.http_urls()
    with urllib.request.urlopen(url + path, timeout=10) as reply:
        return str(reply.read().decode())


def test_a_name_with_slashes_serves_every_verb() -> None:
    with local_instance(http_options={"port": 0}) as client:
        for backend in ("one", "two"):
            client.create_backend(backend, echo)
        client.create_endpoint(NAME, backend="one", route="/r")
        client.set_traffic(NAME, {"one": 0.5, "two": 0.5})
        client.shadow_traffic(NAME, "two", 0.5)
        assert client.get_handle(NAME).remote(q="by handle").result() == "by handle"
        assert fetch(client, "/r?q=by-http") == "by-http"
        assert json.loads(fetch(client, "/-/routes")) == {"/r": NAME}
        assert client.list_endpoints()[NAME]["route"] == "/r"
        assert list(client.status().endpoints) == [NAME]
        client.delete_endpoint(NAME)
        assert client.list_endpoints() == {}
        with pytest.raises(ServeError, match=NAME):
            client.get_handle(NAME)


@for_each("name", ["", "a#b"])
def test_names_that_no_endpoint_can_have(name: str) -> None:
    with pytest.raises(BadRequestError, match="endpoint_name must be a name without '#', got"):
        check_endpoint_name(name, "endpoint_name")


def test_backends_have_no_slashes_in_their_names() -> None:
    with pytest.raises(BadRequestError, match="must be a name without '#' and '/', got 'a/b'"):
        check_name("a/b", "backend_tag")
    with pytest.raises(TypeError, match="must be a string"):
        check_name(3, "backend_tag")
