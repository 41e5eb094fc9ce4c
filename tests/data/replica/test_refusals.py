"""If a deployment refuses a request because of its load or state, its caller refuses its own request, too."""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

import daskserve as serve
from daskserve import errors
from daskserve.testing import local_instance

DEADLINE_S = 10.0


class Child:
    async def ping(self) -> None: ...

    async def hang(self) -> None:
        await asyncio.sleep(DEADLINE_S)

    async def fail(self, name: str) -> None:
        if name == "ValueError":
            raise ValueError("boom")
        raise getattr(errors, name)(f"tcp://10.0.0.1 {name}")


class Base:
    """Calls its child."""

    def __init__(self, child: serve.Handle) -> None:
        self.child = child

    def call(self, request: Any) -> Any:
        what = request.query_params["what"]
        if what == "late":
            return self.child.options(method_name="hang", timeout_s=0.01).remote()
        if what == "full":  # one runs, one waits, and the third is refused
            self.held = [self.child.hang.remote() for _ in range(2)]
            return self.child.hang.remote()
        return self.child.fail.remote(what)

    def free(self) -> None:
        """Cancel the held requests; return when they have left the queue and the slot of the child."""
        for each in self.__dict__.pop("held", ()):
            each.cancel()
        while True:
            try:
                self.child.ping.remote().result(DEADLINE_S)
            except errors.BackPressureError:
                continue  # the queue is still full
            return


class AsyncParent(Base):
    async def __call__(self, request: Request) -> Any:
        kind = request.query_params.get("kind")
        try:
            if kind == "stream":
                return self.chunks(request)
            if kind == "response":
                return StreamingResponse(self.chunks(request))
            return await self.call(request)
        except errors.ServeError as error:
            if kind == "own":
                raise KeyError("mine") from error
            raise

    async def chunks(self, request: Request) -> AsyncIterator[str]:
        await self.call(request)
        yield ""

    async def through(self, what: str) -> None:
        await self.child.fail.remote(what)


class PlainParent(Base):
    def __call__(self, request: Any) -> Any:
        self.call(request).result(DEADLINE_S)


class BatchParent(Base):
    @serve.accept_batch
    async def __call__(self, requests: list[Any]) -> Any:
        await self.call(requests[0])


class Top(Base):
    async def __call__(self, request: Request) -> None:
        await self.child.through.remote(request.query_params["what"])


app = FastAPI()


@app.exception_handler(errors.QuarantinedError)
async def handled(request: Any, error: Exception) -> Response:
    return JSONResponse("handled", 418)


@app.middleware("http")
async def passed_through(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    return response


@serve.ingress(app)
class FastAPIParent(Base):
    @app.get("/")
    async def get(self, request: Request) -> Any:
        return await self.call(request)

    @app.get("/plain")
    def get_plain(self, request: Request) -> Any:
        return self.call(request).result(DEADLINE_S)


def starlette() -> Starlette:
    async def get(request: Request) -> Response:
        raise getattr(errors, request.query_params["what"])("no")

    async def own_500(request: Request) -> Response:
        return PlainTextResponse("Internal Server Error", 500)

    below = Starlette(routes=[Route("/", get), Route("/own", own_500)])
    return Starlette(routes=[Mount("/", below)])


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        client.deploy("child", Child, config={"max_concurrent_queries": 1, "max_queued_requests": 1})
        for name, parent in (("async", AsyncParent), ("plain", PlainParent), ("batch", BatchParent)):
            client.deploy(name, parent, client.get_handle("child"))
        client.deploy("worker", AsyncParent, client.get_handle("child"), config={"event_loop": "worker"})
        client.deploy("fastapi", FastAPIParent, client.get_handle("child"))
        client.deploy("top", Top, client.get_handle("async"))
        client.create_backend("starlette", starlette())
        client.create_endpoint("starlette", backend="starlette", route="/starlette")
        yield client


def get(client: serve.Client, path: str) -> tuple[int, str | None]:
    """Return the status of a response, and its ``Retry-After``."""
    try:
        with urllib.request.urlopen(client.http_urls()[0] + path, timeout=DEADLINE_S) as response:
            return response.status, response.headers.get("retry-after")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("retry-after")


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[str, bool]]:
    """Return the loggers of errors, and whether each logged a traceback."""
    found = [each for each in caplog.records if each.levelno >= logging.WARNING]
    return [(each.getMessage().split(" to ")[1].split("#")[0], each.exc_info is not None) for each in found]


REFUSED = [
    ("full", (503, "1")),
    ("late", (408, None)),
    ("UnavailableError", (503, "1")),
    ("ActorLostError", (502, None)),
]
PATHS = (
    *("/async?", "/async?kind=stream&", "/async?kind=response&", "/worker?", "/plain?", "/batch?"),
    *("/fastapi/?", "/fastapi/plain?"),
)


@pytest.mark.parametrize(("what", "expected"), [*REFUSED, ("ValueError", (500, None))])
def test_a_parent_answers_as_its_child(
    client: serve.Client, what: str, expected: tuple[int, str | None]
) -> None:
    for path in PATHS:
        parent = client.get_handle(path.strip("/").split("?")[0].split("/")[0])
        # The first call of a handle may be overtaken by the next ones.
        parent.free.remote().result(DEADLINE_S)
        try:
            assert get(client, f"{path}what={what}") == expected, path
        finally:
            parent.free.remote().result(DEADLINE_S)


def test_a_refusal_passes_through_any_number_of_deployments_and_is_one_line(
    client: serve.Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert get(client, "/top?what=BackPressureError") == (503, "1")
    assert records(caplog) == [("child", False)]
    caplog.clear()
    # Further errors of this kind are not logged.
    for _ in range(3):
        assert get(client, "/top?what=BackPressureError") == (503, "1")
    assert records(caplog) == []
    with pytest.raises(errors.BackPressureError, match="BackPressureError"):
        client.get_handle("async").through.remote("BackPressureError").result(DEADLINE_S)


def test_an_application_may_answer_in_its_own_way(
    client: serve.Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert get(client, "/async?kind=own&what=UnavailableError") == (500, None)
    assert ("async", True) in records(caplog)
    assert get(client, "/fastapi/?what=QuarantinedError") == (418, None)
    assert get(client, "/starlette/?what=UnavailableError") == (503, "1")
    assert get(client, "/starlette/own") == (500, None)


def test_a_mistake_of_the_parent_is_not_passed_on(client: serve.Client) -> None:
    for what in ("NotFoundError", "BadRequestError"):
        assert get(client, f"/async?what={what}") == (500, None)
