"""The messages of failed starts, requests and ends: at most 25 lines, with the user's line and the remedy."""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import daskserve as serve
from daskserve.client.instance.calls import wait_for_http
from daskserve.errors import ClosedError, DeployError, NotFoundError, RequestTimeoutError, ServeError
from daskserve.testing import local_instance


class LateProxies:
    """Calls of a controller whose proxies do not listen."""

    async def call(self, verb: str, *, timeout_s: float) -> None:
        raise RequestTimeoutError("the port is closed")


async def test_proxies_that_do_not_listen_in_time_are_an_error_that_commands_show() -> None:
    with pytest.raises(ServeError, match="not available after 5s: the port is closed") as caught:
        await wait_for_http(LateProxies(), 5.0)  # type: ignore[arg-type]
    assert isinstance(caught.value, TimeoutError)


def load(path: str) -> Any:
    raise FileNotFoundError(path)


class Model:
    def __init__(self, phase: str = "") -> None:
        self.phase = phase
        if phase == "constructor":
            load("weights")

    def reconfigure(self, config: Any) -> None:
        if self.phase == "reconfigure":
            load("config")

    def __call__(self, request: Any = None) -> Any:
        return load("page") if self.phase == "request" else "ok"

    def __del__(self) -> None:
        if self.phase == "shutdown":
            load("lock")


class Shop:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def __call__(self, request: Any = None) -> Any:
        return await self.model.remote()


def ingress(phase: str) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if phase == "lifespan":
            load("database")
        yield
        if phase == "shutdown":
            load("lock")

    api = FastAPI(lifespan=lifespan)

    class Site:
        def __init__(self) -> None:
            if phase == "constructor":
                load("weights")

        @api.get("/")
        def page(self) -> Any:
            return load("page") if phase == "request" else "ok"

    return serve.deployment(name="Shop")(serve.ingress(api)(Site)).bind()


def composed(phase: str) -> Any:
    model = serve.deployment(Model).options(user_config={}).bind(phase)
    return serve.deployment(Shop).bind(model)


KINDS: dict[str, Callable[[str], Any]] = {
    "fastapi": ingress,
    "class": lambda phase: serve.deployment(Model).options(name="Shop", user_config={}).bind(phase),
    "composed": composed,
}


@pytest.fixture
def client() -> Iterator[Any]:
    with local_instance() as found:
        yield found


def deploy(client: Any, kind: str, phase: str) -> Any:
    if kind == "classic":
        client.create_backend("Shop", Model, phase, config={"user_config": {}})
        client.create_endpoint("Shop", backend="Shop", route="/")
        return client.get_handle("Shop")
    return serve.run(KINDS[kind](phase))


def redeploy(client: Any, kind: str, phase: str) -> None:
    if kind == "classic":
        client.create_backend("Other", Model, phase)
    else:
        deploy(client, kind, phase)


def printed(caught: pytest.ExceptionInfo[Any]) -> str:
    return "".join(traceback.format_exception(caught.value))


def check(text: str, *says: str) -> None:
    lines = text.rstrip().splitlines()
    assert len(lines) <= 25, text
    assert f'"{__file__}", line {load.__code__.co_firstlineno + 1}, in load' in text
    assert all(each in text for each in says), text


STARTS = [
    ("fastapi", "constructor"),
    ("fastapi", "lifespan"),
    *[(kind, phase) for kind in ("class", "composed", "classic") for phase in ("constructor", "reconfigure")],
]


@pytest.mark.parametrize(("kind", "phase"), STARTS)
def test_a_failed_start_shows_the_users_line_and_what_to_do(client: Any, kind: str, phase: str) -> None:
    with pytest.raises(DeployError) as caught:
        deploy(client, kind, phase)
    check(printed(caught), f"failed in its {phase}: " if phase != "reconfigure" else "reconfigure(): ")
    assert str(caught.value).endswith("It was removed; correct the code, and deploy it again.")
    assert str(caught.value).count("\n") == 0
    if kind != "classic":
        status = str(serve.status())
        check(status, "DEPLOY_FAILED")
        assert status.count("in load") == 1


def test_a_first_deploy_that_fails_again_leaves_nothing_either(client: Any) -> None:
    for phase in ("constructor", "lifespan", "constructor"):
        with pytest.raises(DeployError, match=r"It was removed; correct the code"):
            deploy(client, "fastapi", phase)


@pytest.mark.parametrize("kind", [*KINDS, "classic"])
def test_a_failed_update_says_that_the_old_version_serves(client: Any, kind: str) -> None:
    handle = deploy(client, kind, "")
    with pytest.raises(DeployError) as caught:
        redeploy(client, kind, "constructor")
    check(printed(caught), "correct the code, and deploy it again.")
    if kind != "classic":
        assert "The version from before keeps serving" in str(caught.value)
    if kind != "fastapi":
        assert handle.remote().result() == "ok"


@pytest.mark.parametrize("kind", ["class", "composed", "classic"])
def test_a_failed_call_shows_the_users_line(client: Any, kind: str) -> None:
    handle = deploy(client, kind, "request")
    with pytest.raises(FileNotFoundError) as caught:
        handle.remote().result()
    check(printed(caught))


def test_a_call_that_fails_three_levels_down_shows_each_level_once(client: Any) -> None:
    model: Any = serve.deployment(Model).bind("request")
    for name in ("Third", "Second", "First"):
        model = serve.deployment(Shop).options(name=name).bind(model)
    with pytest.raises(FileNotFoundError) as caught:
        serve.run(model).remote().result()
    check(printed(caught))
    assert printed(caught).count("await self.model.remote()") == 3


@pytest.mark.parametrize("kind", [*KINDS, "classic"])
def test_the_log_of_a_failed_request_has_no_frames_of_frameworks(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with local_instance(http_options={"port": 0}) as client:
        deploy(client, kind, "request")
        assert httpx.get(client.http_urls()[0]).status_code == 500
    (record,) = [each for each in caplog.records if each.name == "daskserve.replica"]
    check(logging.Formatter().format(record), "failed")
    assert "starlette" not in str(record.exc_text)


@pytest.mark.parametrize("kind", [*KINDS, "classic"])
def test_a_failed_end_is_one_record(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with local_instance() as client:
        deploy(client, kind, "shutdown")
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    check(logging.Formatter().format(record), "failed")


# ---- handles


@pytest.mark.parametrize("kind", ["class", "composed", "classic", "deployment"])
def test_each_way_to_a_handle_explains_a_first_deploy_that_failed(client: Any, kind: str) -> None:
    one = serve.deployment(Model).options(name="Shop")
    with pytest.raises(DeployError):
        one.deploy("constructor") if kind == "deployment" else deploy(client, kind, "constructor")
    ways: list[Callable[[], Any]] = [lambda: client.get_handle("Shop"), lambda: serve.get_handle("Shop")]
    if kind in ("class", "composed"):
        ways += [serve.get_app_handle, lambda: serve.get_deployment_handle("Shop", "default")]
    if kind == "deployment":
        ways += [one.get_handle, lambda: serve.get_deployment("Shop")]
    for way in ways:
        with pytest.raises(NotFoundError, match=r"does not exist.*failed in its constructor") as caught:
            way()
        check(printed(caught), "correct the code")
    # A deployment of another name is not affected, and may be deployed later.
    with pytest.raises(NotFoundError, match=r"'Other' does not exist\.$"):
        client.get_handle("Other")
    assert client.get_handle("Other", missing_ok=True) is not None


def test_a_deploy_that_succeeds_forgets_the_failure(client: Any) -> None:
    for phase in ("constructor", ""):
        try:
            serve.run(composed(phase))
        except DeployError:
            continue
    with pytest.raises(NotFoundError, match=r"'Absent' in application 'default' does not exist\.$"):
        serve.get_deployment_handle("Absent", "default")
    assert serve.status().applications["default"].message == ""


def test_the_old_version_deployed_again_forgets_a_failed_update(client: Any) -> None:
    """Nothing restarts, but the status no longer shows the failure."""
    serve.run(composed(""))
    before = {each.name for each in client.status().replicas()}
    with pytest.raises(DeployError):
        serve.run(composed("constructor"))
    assert client.status().applications["default"].status == "DEPLOY_FAILED"
    serve.run(composed(""))
    status = client.status()
    assert status.applications["default"].status == "RUNNING"
    assert [each.message for each in status.backends.values() if each.message] == []
    assert {each.name for each in status.replicas()} == before


def test_after_shutdown_a_handle_says_so() -> None:
    handle = serve.run(serve.deployment(Model).bind(), local=True)
    assert handle.remote().result() == "ok"
    serve.shutdown()
    with pytest.raises(ClosedError, match=r"shut down .*serve\.run\(\.\.\.\)") as caught:
        handle.remote().result()
    assert "Dask client" not in str(caught.value)
