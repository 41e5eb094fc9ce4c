"""ASGI applications as arguments of `serve.run` and `serve.deployment`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette

import daskserve as serve
from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.client.definitions.targets import application_of, factory_application
from daskserve.client.verbs.applications import RunTarget
from daskserve.errors import BadRequestError
from daskserve.testing import local_instance

MODULE = """
from fastapi import FastAPI

app = FastAPI()
app.state.answers = 0

@app.get("/")
def root():
    app.state.answers += 1  # by the name in this module
    return app.state.answers

def create():
    return app

def build(args):
    built = FastAPI()

    @built.get("/")
    def root():
        return args

    return built

async def asgi(scope, receive, send):
    raise NotImplementedError
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module."""
    name = "asgi_shop"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def instance() -> Iterator[Any]:
    with local_instance(http_options={"port": 0}) as client:
        yield client


def get(instance: Any, path: str) -> Any:
    answer = httpx.get(instance.http_urls()[0] + path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_import_path_names_its_deployment(shop: str) -> None:
    assert serve.deployment(f"{shop}:app").name == "app"
    assert serve.deployment("pkg.mod.Name").name == "Name"
    deployment = application_of(f"{shop}:app").deployment
    assert (deployment.name, deployment.definition) == ("app", f"{shop}:app")
    assert application_of(f"{shop}:asgi").deployment.definition == f"{shop}:asgi"


def test_an_application_by_its_path_is_the_one_of_its_module(shop: str, instance: Any) -> None:
    instance.run(f"{shop}:app", name="path", route_prefix="/path")
    assert [get(instance, "/path/"), get(instance, "/path/")] == [1, 2]
    assert get(instance, "/path/openapi.json")["servers"] == [{"url": "/path"}]


def test_an_application_object_is_served(instance: Any) -> None:
    app = FastAPI()

    @app.get("/")
    def root() -> str:
        return "object"

    instance.run(app, name="object", route_prefix="/object")
    assert get(instance, "/object/") == "object"
    assert application_of(Starlette()).deployment.name == "Starlette"


def test_a_factory_is_called_in_each_replica(shop: str, instance: Any) -> None:
    found = factory_application(f"{shop}:create")
    assert found.deployment.name == "create"
    instance.run(found, name="factory", route_prefix="/factory")
    assert get(instance, "/factory/") == 1


def test_a_builder_may_return_an_asgi_application(shop: str, instance: Any) -> None:
    instance.run(f"{shop}:build", name="built", route_prefix="/built", args={"key": "value"})
    assert get(instance, "/built/") == {"key": "value"}


@pytest.mark.parametrize(
    ("target", "args", "error", "text"),
    [
        ("{shop}:app", {"a": 1}, BadRequestError, "'app' is already built, so it takes no arguments"),
        ("{shop}:create", {}, TypeError, r"exactly one parameter.*serve\.ingress\(function\)"),
        ("{shop}:missing", {}, BadRequestError, "has no 'missing'"),
        (serve.deployment(FastAPI()), {}, TypeError, "deployment 'FastAPI', which is not bound"),
        (7, {}, TypeError, "an ASGI application, .* got 7"),
    ],
)
def test_wrong_targets_say_what_is_missing(
    shop: str, target: Any, args: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        application_of(target.format(shop=shop) if isinstance(target, str) else target, args)


def test_only_one_class_of_an_application_has_routes() -> None:
    @serve.deployment
    @serve.ingress(FastAPI())
    class Inner: ...

    @serve.deployment
    @serve.ingress(FastAPI())
    class Outer:
        def __init__(self, inner: Any) -> None: ...

    with pytest.raises(BadRequestError, match=r"several deployments .*FastAPI.*: 'Inner', 'Outer'"):
        ApplicationGraph(Outer.bind(Inner.bind()), "default")
    assert RunTarget(Inner.bind()).name == "default"
