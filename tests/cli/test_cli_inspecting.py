"""``daskserve profile``, ``stacks`` and ``logs`` on an instance in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import each_case

import daskserve as serve
from daskserve.cli.main import main
from daskserve.cli.verbs import models, operate, rollout
from daskserve.cli.views import history, inspecting
from daskserve.cli.views import logs as log_view
from daskserve.client.client import Client
from daskserve.testing import local_instance

SHORT = ("--seconds", "0.03")


class Model:
    async def __call__(self, request: Any = None) -> str:
        return "ok"


@pytest.fixture(scope="module")
def shop() -> Iterator[Client]:
    with local_instance() as client:
        client.run(serve.deployment(Model).bind(), name="shop", route_prefix=None)
        client.run(serve.deployment(Model).options(num_replicas=2).bind(), name="default", route_prefix=None)
        yield client


@pytest.fixture(autouse=True)
def connected(shop: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connect(*_: Any) -> Iterator[Client]:
        yield shop

    monkeypatch.setattr(inspecting, "reading", connect)
    for module in (log_view, history, models, rollout):
        monkeypatch.setattr(module, "reading", connect)
    monkeypatch.setattr(operate, "connected", connect)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@each_case("name", ["shop/Model", "Model", "default/Model"])
def test_a_replica_is_found_by_its_deployment(name: str) -> None:
    found = json.loads(call("profile", name, *SHORT, "--json").stdout)
    tag = name.removeprefix("default/")
    assert (found["deployment"], found["replica"].partition("#")[0]) == (tag, tag)
    assert found["ticks"] >= 1
    again = json.loads(call("stacks", found["replica"], "--json").stdout)
    assert again["replica"] == found["replica"]
    assert again["state"] == "RUNNING"


def test_a_profile_is_written_in_the_format_of_its_file(tmp_path: Path) -> None:
    for name, begin in (("p.html", "<!doctype html>"), ("p.svg", "<svg "), ("p.json", '{"replica"')):
        result = call("profile", "shop/Model", *SHORT, "-o", str(tmp_path / name))
        assert (result.exit_code, f"Written to {tmp_path / name}" in result.stdout) == (0, True)
        assert (tmp_path / name).read_text().startswith(begin)
    result = call("profile", "shop/Model", *SHORT, "-o", str(tmp_path / "no" / "p.svg"))
    assert (result.exit_code, "Could not write" in result.stderr) == (1, True)
    assert "Lines that hold memory" in call("profile", "shop/Model", *SHORT, "--memory").stdout
    assert "No user code runs." in call("profile", "shop/Model", "--stack").stdout
    assert "UserLoop._main" in call("stacks", "shop/Model", "--full").stdout


def test_logs_are_found_by_the_names_of_the_status_and_by_all_filters_together(shop: Client) -> None:
    def model(number: int) -> None:
        logging.getLogger("daskserve").warning("too large: %s", number)
        logging.getLogger("daskserve").info("too large, again: %s", number)

    handle = shop.run(serve.deployment(model).bind(), name="a/b", route_prefix=None)
    handle.remote(7).result()
    handle.remote(8).result()
    (replica,) = (each.name for each in shop.status().actors if each.name.startswith("a%2Fb/model#"))
    filters = ("--level", "warning", "--grep", "large: 8", "--since", "1m", "--json")
    for name in ("a%2Fb", "a%2Fb/model", replica):
        (found,) = json.loads(call("logs", name, *filters).stdout)
        assert (found["message"], found["application"], found["replica"]) == ("too large: 8", "a/b", replica)
    shop.delete_application("a/b")


def test_commands_take_the_names_of_deployments_as_the_status_shows_them(shop: Client) -> None:
    shop.run(serve.deployment(lambda: None, name="c#d").bind(), name="a/b", route_prefix=None)
    for target in ("a%2Fb", "a%2Fb/c%23d"):
        assert "a%2Fb/c%23d: 1 of 1 wanted replicas run" in call("explain", target).stdout
        assert call("scale", target, "1").exit_code == 0
        assert call("restart", target).exit_code == 0
        assert (
            "There is no rollout of deployment 'c#d' of application 'a/b'"
            in call("rollout", "status", target).stderr
        )
    assert (
        "model_repository of deployment 'c#d' of application 'a/b'"
        in call("models", "list", "a%2Fb/c%23d").stderr
    )
    shop.delete_application("a/b")


@each_case(
    ("arguments", "code", "text"),
    [
        (("shop/Modl",), 1, "the nearest are: shop/Model, shop/Model#"),
        (("shop/Model", "--seconds", "61"), 2, "0<x<=60"),
        (("shop/Model", "--seconds", "0"), 2, "0<x<=60"),
        (("shop/Model", "--memory", "--format", "svg"), 2, "leave out --memory or --format svg"),
        (("shop/Model", "--stack", "--memory"), 2, "--stack cannot be combined"),
    ],
)
def test_wrong_uses_are_explained(arguments: tuple[str, ...], code: int, text: str) -> None:
    result = call("profile", *arguments)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
