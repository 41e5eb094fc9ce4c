"""HTTP requests that name the method to call (feature CL30)."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tables import case

import daskserve as serve
from daskserve.errors import BadRequestError
from daskserve.testing import local_instance

DEADLINE_S = 10.0
ON = {"method_header": True}


class Model:
    """Returns the called method and its argument."""

    def __call__(self, request: Any) -> str:
        return f"call {type(request).__name__} {request.query_params.get('q')}"

    def plain(self, request: Any) -> str:
        return f"plain {type(request).__name__} {request.query_params.get('q')} {request.body_bytes.decode()}"

    async def on_loop(self, request: Any) -> str:
        return f"on_loop {type(request).__name__} {(await request.body()).decode()}"

    def bare(self) -> str:
        return "bare"

    def stream(self, request: Any) -> Iterator[str]:
        yield from ("a", "b")

    @serve.batch(max_batch_size=1)
    async def batched(self, requests: list[Any]) -> list[str]:
        return [f"batched {type(request).__name__}" for request in requests]

    @serve.accept_batch
    def many(self, requests: list[Any]) -> list[str]:
        return [f"many {type(request).__name__}" for request in requests]

    async def app(self, scope: Any, receive: Any, send: Any) -> None: ...

    def reconfigure(self, user_config: Any) -> None: ...

    def check_health(self) -> None: ...

    def _secret(self, request: Any) -> str:
        return "secret"


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        for name, config in (("off", {}), ("on", ON), ("isolated", {**ON, "isolation": "process"})):
            client.create_backend(name, Model, config=config)
            client.create_endpoint(name, backend=name, route=f"/{name}", methods=["GET", "POST"])
        yield client


def fetch(client: serve.Client, path: str, method: str | None, body: bytes | None = None) -> tuple[int, str]:
    (url,) = client.http_urls()
    headers = {} if method is None else {"X-Serve-Call-Method": method}
    request = urllib.request.Request(f"{url}/{path}?q=1", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_header_picks_the_method_which_gets_the_same_request(client: serve.Client) -> None:
    for path in ["on", "isolated"]:
        for method, text in [
            (None, "call HTTPRequest 1"),
            ("__call__", "call HTTPRequest 1"),
            ("plain", "plain HTTPRequest 1 data"),
            ("on_loop", "on_loop HTTPRequest data"),
            ("bare", "bare"),
            ("stream", "ab"),
            ("batched", "batched HTTPRequest"),
            ("many", "many HTTPRequest"),
        ]:
            with case(path, method, text):
                assert fetch(client, path, method, b"data") == (200, text)


def test_the_header_is_nothing_special_unless_asked_for(client: serve.Client) -> None:
    for method in ("plain", "missing", "_secret"):
        assert fetch(client, "off", method) == (200, "call HTTPRequest 1")


def test_a_method_that_is_not_public_is_rejected_with_a_list_of_the_public_ones(client: serve.Client) -> None:
    for method in [
        "missing",
        "_secret",
        "__init__",
        "__del__",
        "reconfigure",
        "check_health",
        "app",
        "",
        "\xe9",
    ]:
        with case(method):
            status, text = fetch(client, "on", method)
            assert status == 400
            assert text.endswith("choose one of: __call__, bare, batched, many, on_loop, plain, stream.")


def test_it_can_be_switched_while_it_runs(client: serve.Client) -> None:
    client.create_backend("switched", Model)
    client.create_endpoint("switched", backend="switched", route="/switched")
    for is_on, text in ((True, "bare"), (False, "call HTTPRequest 1")):
        client.update_backend_config("switched", {"method_header": is_on})
        assert fetch(client, "switched", "bare") == (200, text)


def test_functions_have_one_method_and_applications_none(client: serve.Client) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": dict(scope["headers"])[b"x-serve-call-method"]})

    for name, definition in (("function", lambda: "answer"), ("application", app)):
        client.create_backend(name, definition, config=ON)
        client.create_endpoint(name, backend=name, route=f"/{name}")
    assert fetch(client, "function", None) == (200, "answer")
    status, text = fetch(client, "function", "other")
    assert (status, text.rpartition(": ")[2]) == (400, "__call__.")
    assert fetch(client, "application", "other") == (200, "other")


class Greeter:
    """Has no ``__call__``."""

    def greet(self, who: Any) -> str:
        return f"Hello, {who if isinstance(who, str) else who.query_params['q']}!"

    async def part(self, who: Any) -> str:
        return "Goodbye!"

    def check_health(self) -> None: ...


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_methods_of_a_class_without_call_answer_by_header_and_by_handle(
    client: serve.Client, isolation: str
) -> None:
    name = f"greeter-{isolation}"
    client.deploy(name, Greeter, config={"isolation": isolation, **ON})
    assert fetch(client, name, "greet") == (200, "Hello, 1!")
    assert fetch(client, name, "part", b"data") == (200, "Goodbye!")
    for method, problem in ((None, "is missing"), ("__call__", "is missing"), ("other", "names 'other'")):
        status, text = fetch(client, name, method)
        assert status == 400
        assert f"X-SERVE-CALL-METHOD {problem}" in text
        assert text.endswith("choose one of: greet, part.")
    handle: Any = client.get_handle(name)
    assert handle.greet.remote("you").result() == "Hello, you!"
    with pytest.raises(BadRequestError, match=r"no public method '__call__'; it has: .*greet, part"):
        handle.remote("you").result()


def test_without_the_option_a_class_without_call_answers_by_handle_only(client: serve.Client) -> None:
    client.deploy("quiet", Greeter)
    for method, body in ((None, None), ("greet", None), (None, b"data")):
        status, text = fetch(client, "quiet", method, body)
        assert status == 400
        assert "only if its backend has the option method_header=True" in text
    handle: Any = client.get_handle("quiet")
    assert handle.greet.remote("you").result() == "Hello, you!"
