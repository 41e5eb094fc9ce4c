"""The examples of the guides in docs/ work unchanged, and print the output in the guides."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from blocking_websocket import WebSocketClient, talk
from wsproto.events import AcceptConnection, Message

import daskserve as serve
from daskserve.testing import local_instance

DOCS = Path(__file__).parent.parent / "docs"
#: The address in the guides.
ADDRESS = "http://127.0.0.1:8000"


class Counted:
    """A pytest plugin that counts passed tests."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def instance() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        yield client


@pytest.fixture
def paste(instance: serve.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs the program of a page, and returns its names."""

    def run(target: Any, *, blocking: bool, **options: Any) -> None:
        assert blocking
        instance.run(target, **options)

    def paste(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(blocks(page, "python")[0], page, "exec", dont_inherit=True), names)
        return names

    monkeypatch.setattr(serve, "run", run)
    yield paste
    for name in instance.status().applications:
        instance.delete_application(name)


def conversations(page: str) -> list[tuple[list[str], str]]:
    """Return the curl commands of a page, each with the output that the page shows."""
    found = "".join(blocks(page, "console")).split("$ ")[1:]
    pairs = [each.partition("\n") for each in found]
    return [(shlex.split(command), output) for command, _, output in pairs if command.startswith("curl ")]


@pytest.mark.parametrize(
    "page",
    [
        "composition.md",
        "fastapi.md",
        "streaming.md",
        "batching.md",
        "continuous_batching.md",
        "multiplexing.md",
        "migrating.md",
    ],
    ids=lambda page: page[:-3],
)
def test_the_program_answers_curl_as_the_page_shows(page: str, paste: Any, instance: serve.Client) -> None:
    paste(page)
    (url,) = instance.http_urls()
    expected = conversations(page)
    assert expected
    for command, output in expected:
        real = [word.replace(ADDRESS, url) for word in command]
        ended = subprocess.run([*real, "-sS"], capture_output=True, text=True, timeout=30)
        assert ended.stderr == ""
        assert ended.stdout.rstrip("\n") == output.rstrip("\n")


def test_the_routers_of_the_page_choose(
    paste: Any, instance: serve.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "run", instance.run)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("routers.md", "python"):
        exec(compile(block, "routers.md", "exec", dont_inherit=True), names)
    assert capsys.readouterr().out == "1\n"
    chat = names["Chat"].options(request_router_config=names["config"])
    handle = instance.run(chat.bind(), name="chat", route_prefix="/chat")
    assert handle.remote("a long question").result()


@contextmanager
def guest(url: str, name: str) -> Iterator[WebSocketClient]:
    with talk(f"{url}/rooms/lobby?name={name}") as client:
        assert isinstance(client.event(), AcceptConnection)
        yield client


def test_guests_of_two_replicas_chat(paste: Any, instance: serve.Client) -> None:
    paste("websockets.md")
    url = instance.http_urls()[0].replace("http", "ws")
    with guest(url, "Ann") as ann:
        assert ann.message() == "Ann joins"
        with guest(url, "Bob") as bob:
            assert [ann.message(), bob.message()] == ["Bob joins"] * 2
            with guest(url, "Cleo") as cleo:
                everyone = [ann, bob, cleo]
                assert [each.message() for each in everyone] == ["Cleo joins"] * 3
                for name, speaker in zip(("Ann", "Bob", "Cleo"), everyone, strict=True):
                    speaker.send(Message(data="hello"))
                    assert [each.message() for each in everyone] == [f"{name}: hello"] * 3
            assert [ann.message(), bob.message()] == ["Cleo leaves"] * 2
            # Each of the two replicas sends to the guests connected to it.
            replicas = instance.get_app_handle("default").broadcast("deliver", "lobby", "Closing time")
            assert replicas.results(10) == [None, None]
            assert [ann.message(), bob.message()] == ["Closing time"] * 2
        assert ann.message() == "Bob leaves"


def test_an_existing_application_is_served(
    instance: serve.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hello, deployed, _ = blocks("fastapi.md", "python")
    (tmp_path / "hello.py").write_text(hello)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(deployed, names)
    (url,) = instance.http_urls()
    try:
        for target in ("hello:app", names["deployed"]):
            instance.run(target)
            assert httpx.get(f"{url}/hello/you").json() == {"hello": "you"}
        assert instance.status().backends["app"].wanted == 4
    finally:
        instance.delete_application("default")
        sys.modules.pop("hello", None)


def test_a_replica_adds_routes(instance: serve.Client) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(blocks("fastapi.md", "python")[3], names)
    (url,) = instance.http_urls()
    try:
        instance.run(names["Translations"].bind())
        assert [httpx.get(f"{url}/{each}").json() for each in ("fr?text=a", "info/size")] == ["a in fr", 2]
        assert sorted(httpx.get(f"{url}/openapi.json").json()["paths"]) == ["/en", "/fr", "/info/size"]
    finally:
        instance.delete_application("default")


@pytest.mark.filterwarnings("ignore:Using `httpx` with")
def test_a_class_with_routes_is_tested_without_a_server(paste: Any) -> None:
    from fastapi.testclient import TestClient  # newer versions of Starlette warn that httpx has a successor

    prices = paste("fastapi.md")["Prices"]
    with TestClient(prices.definition({"EUR": 1.0})) as client:
        assert client.get("/currencies").json() == ["EUR"]


def test_methods_with_routes_are_called_by_handle(paste: Any, instance: serve.Client) -> None:
    names = paste("fastapi.md")
    handle = instance.get_app_handle("default")
    assert handle.currencies.remote().result(10) == ["EUR", "USD"]
    house = names["House"](area=100)
    assert handle.predict.remote(house, ("EUR", 1.0)).result(10) == names["Price"](
        price=305000.0, currency="EUR"
    )


def test_streams_are_read_in_python(paste: Any, instance: serve.Client) -> None:
    paste("streaming.md")
    handle = instance.get_deployment_handle("Model", "default")
    assert list(handle.options(stream=True).generate.remote("a", 3)) == ["a0", "a1", "a2"]


def test_calls_by_handle_share_a_batch(paste: Any, instance: serve.Client) -> None:
    scores = paste("batching.md")["Scores"].definition()

    async def together() -> list[Any]:
        return await asyncio.gather(scores.predict([1, 1]), scores.predict([2, 1]))

    assert [each["batch"] for each in asyncio.run(together())] == [2, 2]
    handle = instance.get_app_handle("default")
    responses = [handle.predict.remote([1, x]) for x in range(40)]
    assert [each.result(10)["score"] for each in responses] == [0.5 + 2 * x for x in range(40)]
    # More than the decorator's 16, because `user_config` sets the limit.
    assert max(each.result(10)["batch"] for each in responses) > 16


def test_the_test_file_of_the_testing_page_passes(tmp_path: Path) -> None:
    (example,) = blocks("testing.md", "python")
    (tmp_path / "test_shop.py").write_text(example)
    collected = Counted()
    ended = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)], plugins=[collected]
    )
    sys.modules.pop("test_shop", None)
    assert (ended, collected.passed) == (0, 5)


def test_the_names_that_replace_those_of_ray_serve_exist() -> None:
    text = (DOCS / "migrating.md").read_text(encoding="utf-8").partition("### What differs")[0]
    new = [row.split("|")[2] for row in text.partition("### Names old to new")[2].splitlines() if "|" in row]
    for name in re.findall(r"`(?:serve|daskserve)\.(\w+)", " ".join(new)):
        assert getattr(serve, name) is not None
    same = re.findall(r"^\| (.*?) \| the same", text, re.MULTILINE)
    names = [name for row in same for name in re.findall(r"(?<![.\w])@?(?:serve\.)?(\w+)`", row)]
    assert {"run_many", "deployment", "batch", "get_replica_context"} <= set(names)
    for name in names:
        assert hasattr(serve, name)
