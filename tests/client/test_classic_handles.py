"""Handles in the classic API: from programs, backends and Dask tasks (rows CL31 to CL36)."""

from __future__ import annotations

import asyncio
import re
import warnings
from typing import Any

import pytest
from dask_processes import fetch
from served import NotOnTheOtherSide
from starlette.requests import Request

import daskserve as serve


class Echo:
    """Returns the parts of a request, with the same code for HTTP and handles."""

    async def __call__(self, request: Any) -> dict[str, Any]:
        return {
            "kind": type(request).__name__,
            "method": request.method,
            "text": request.query_params.get("text"),
            "texts": request.query_params.getlist("text"),
            "header": request.headers.get("X-Header"),
        }

    def other(self, request: Any) -> str:
        return f"other {request.query_params.get('text')}"


@pytest.fixture
def echo(client: serve.Client) -> serve.Handle:
    client.create_backend("echo", Echo)
    client.create_endpoint("echo", backend="echo", route="/echo", methods=["GET", "POST"])
    return client.get_handle("echo")


def test_get_handle(client: serve.Client, echo: serve.Handle) -> None:
    """CL31: an unknown name raises a KeyError, unless missing_ok."""
    assert isinstance(echo, serve.Handle)
    with pytest.raises(KeyError, match=r"^Endpoint 'later' does not exist\.$"):
        client.get_handle("later")
    early = client.get_handle("later", missing_ok=True)
    client.create_endpoint("later", backend="echo")
    assert early.remote(text="x").result()["text"] == "x"


def test_get_handle_warns_about_the_wrong_kind(client: serve.Client, echo: serve.Handle) -> None:
    """CL31: a sync handle in an event loop and an async one outside warn; both work."""
    with pytest.warns(UserWarning, match="sync=False outside an event loop"):
        handle = client.get_handle("echo", sync=False)
    assert asyncio.run(handle.remote(text="x")).result()["text"] == "x"

    async def inside() -> Any:
        with pytest.warns(UserWarning, match="sync=True inside an event loop"):
            sync = client.get_handle("echo", sync=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fitting = client.get_handle("echo", sync=False)
        return await asyncio.gather(sync.remote(text="a"), await fitting.remote(text="b"))

    assert [each["text"] for each in asyncio.run(inside())] == ["a", "b"]


def test_handle_and_http_give_the_same_answer(echo: serve.Handle, url: str) -> None:
    """CL32: ``remote()`` returns at once; its result, blocking or awaited, is the HTTP answer."""
    response = echo.remote(text="hi")
    assert isinstance(response, serve.handle.Response)
    by_handle = response.result(10)
    assert response.done()
    by_http = fetch(f"{url}/echo?text=hi").json
    assert by_handle.pop("kind") == "ServeRequest"
    assert by_http.pop("kind").endswith("Request")
    assert by_handle == by_http == {"method": "GET", "text": "hi", "texts": ["hi"], "header": None}

    async def awaited() -> Any:
        return await echo.remote(text="hi")

    assert asyncio.run(awaited())["text"] == "hi"


def test_errors_of_user_code_keep_their_type(client: serve.Client) -> None:
    """CL32: the caller gets the error itself, its fields, and the replica's traceback as its cause."""

    class Failing:
        def __call__(self, request: Any) -> None:
            raise NotOnTheOtherSide("for a reason", code=42)

        async def later(self, request: Any) -> None:
            raise ZeroDivisionError("in a coroutine")

        def unpicklable(self, request: Any) -> None:
            class Local(Exception):
                def __reduce__(self) -> Any:
                    raise TypeError("not me")

            raise Local("cannot be pickled")

    client.create_backend("failing", Failing)
    client.create_endpoint("failing", backend="failing")
    handle = client.get_handle("failing")
    with pytest.raises(NotOnTheOtherSide, match="for a reason") as caught:
        handle.remote().result(10)
    assert (caught.value.reason, caught.value.code) == ("for a reason", 42)
    assert "raise NotOnTheOtherSide" in str(caught.value.__cause__)
    with pytest.raises(ZeroDivisionError, match="in a coroutine"):
        handle.options(method_name="later").remote().result(10)
    with pytest.raises(Exception, match=r"^cannot be pickled$") as caught_here:
        handle.options(method_name="unpicklable").remote().result(10)
    assert type(caught_here.value).__name__ == "Local"

    async def awaited() -> None:
        await handle.remote()

    with pytest.raises(NotOnTheOtherSide):
        asyncio.run(awaited())


def test_options_return_a_new_handle(echo: serve.Handle) -> None:
    """CL33: the original is unchanged; errors for unknown options and attributes name the remedy."""
    posted = echo.options(http_method="POST", http_headers={"x-header": "yes"})
    found = posted.remote(text="x").result(10)
    assert (found["method"], found["header"]) == ("POST", "yes")
    found = echo.remote(text="x").result(10)
    assert (found["method"], found["header"]) == ("GET", None)
    assert echo.options(method_name="other").remote(text="x").result(10) == "other x"
    assert echo.options(shard_key="k").remote(text="x").result(10)["text"] == "x"
    with pytest.raises(AttributeError, match=r"options\(method_name='other'\)"):
        _ = echo.other
    with pytest.raises(TypeError, match="no option 'method'"):
        echo.options(method="other")
    with pytest.raises(serve.errors.ServeError, match="no public method 'missing'"):
        echo.options(method_name="missing").remote().result(10)


def test_a_call_by_handle_arrives_as_a_serve_request(client: serve.Client) -> None:
    """CL34: the attributes of the request of a call by handle."""

    async def describe(request: Any) -> Any:
        found = {"body": await request.body(), "list": request.query_params.getlist("many")}
        for name in ("json", "form"):
            try:
                found[name] = await getattr(request, name)()
            except serve.errors.ServeError as error:
                found[name] = str(error)
        return found

    client.create_backend("describe", describe)
    client.create_endpoint("describe", backend="describe")
    handle = client.get_handle("describe")
    data = {"a": [1, 2], (3, 4): b"raw"}
    assert handle.remote(data, many=[1, 2]).result(10) == {
        "body": data,
        "list": [1, 2],
        "json": data,
        "form": data,
    }
    found = handle.remote([1, 2]).result(10)
    assert found["body"] == [1, 2]
    assert "needs a dict" in found["json"]
    assert "needs a dict" in found["form"]


def test_a_starlette_request_is_passed_through(client: serve.Client) -> None:
    """CL34: a Request given to ``remote()`` arrives as the Request."""
    client.create_backend("method", lambda request: [isinstance(request, Request), request.url.path])
    client.create_endpoint("method", backend="method")
    scope = {"type": "http", "method": "GET", "path": "/from/afar", "query_string": b"", "headers": []}
    request = Request({**scope, "server": ("host", 80), "scheme": "http"})
    assert client.get_handle("method").remote(request).result(10) == [True, "/from/afar"]


def test_replica_context_inside_and_outside_a_replica(client: serve.Client, url: str) -> None:
    """CL36: tags inside (constructor, plain and async code), ServeErrors outside a replica."""

    class Who:
        def __init__(self) -> None:
            self.made_as = serve.get_current_replica_tag()

        def __call__(self, request: Any) -> list[str]:
            return [self.made_as, serve.get_current_backend_tag(), serve.get_current_replica_tag()]

        async def later(self, request: Any) -> list[str]:
            return self(request)

    client.create_backend("who", Who)
    client.create_endpoint("who", backend="who", route="/who")
    handle = client.get_handle("who")
    answers = [
        fetch(f"{url}/who").json,
        handle.remote().result(10),
        handle.options(method_name="later").remote().result(10),
    ]
    for made_as, backend, replica in answers:
        assert backend == "who"
        assert made_as == replica
        assert re.fullmatch("who#[A-Za-z]{6}", replica)
    for getter in (serve.get_current_backend_tag, serve.get_current_replica_tag):
        with pytest.raises(serve.errors.ServeError, match="does not run in a daskserve replica"):
            getter()
