"""Models that replicas load and unload while they serve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from quick_instance import poll_for as poll

import daskserve as serve
from daskserve.cli import instance
from daskserve.cli.main import main
from daskserve.client.client import Client
from daskserve.client.verbs.models import ModelVerbs
from daskserve.control.backend import model_reconciler
from daskserve.errors import (
    BadRequestError,
    DeployError,
    NotFoundError,
    ReplicaStartError,
    RequestTimeoutError,
)
from daskserve.testing import local_instance


class Adder:
    """Its models are numbers in files, and it adds them to its argument."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    def load_model(self, name: str, version: str, path: str) -> int:
        return int(Path(path, "number").read_text())

    def unload_model(self, name: str, version: str) -> None:
        self.unloaded.append(f"{name}/{version}")

    def __call__(self, number: int, name: str = "three", version: str | None = None) -> Any:
        return number + serve.get_model(name, version), self.unloaded


class Silent:
    def __call__(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, version, number in (("three", "9", "3"), ("three", "10", "30"), ("four", "1", "4")):
        put(tmp_path, name, version, number)
    return tmp_path


def put(folder: Path, name: str, version: str, number: str) -> None:
    place = folder / name / version
    place.mkdir(parents=True)
    (place / "number").write_text(number)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(model_reconciler, "PERIOD_S", 0.02)
    with local_instance() as client:
        monkeypatch.setattr(instance, "connect", lambda **_: serve.connect())
        yield client


def run(folder: Path, **options: Any) -> Any:
    adder = serve.deployment(Adder).options(model_repository={"url": str(folder), **options}, num_replicas=2)
    return serve.run(adder.bind())


def poll_for(condition: Callable[[], Any]) -> None:
    poll(condition, what=lambda: str(serve.status()))


def states(client: Client, name: str = "three") -> dict[str, str]:
    return {version: each["state"] for version, each in client.list_models("Adder")[name].items()}


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["models", *arguments, "-a", "tcp://host:1"])


def test_models_are_loaded_and_unloaded_without_a_deploy(folder: Path, client: Client) -> None:
    handle = run(folder, mode="explicit")
    with pytest.raises(NotFoundError, match=r"Model 'three' is not loaded; loaded: none\."):
        handle.remote(1).result()
    assert states(client) == {"9": "AVAILABLE", "10": "AVAILABLE"}
    assert client.load_model("Adder", "three", "9") == "9"
    assert [handle.remote(1).result()[0] for _ in range(4)] == [4, 4, 4, 4]
    assert client.load_model("Adder", "three", default=False) == "10"
    assert (handle.remote(1).result()[0], handle.remote(1, version="10").result()[0]) == (4, 31)
    client.set_default_model("Adder", "three", "10")
    poll_for(lambda: {handle.remote(1).result()[0] for _ in range(6)} == {31})
    client.unload_model("Adder", "three", "9")
    poll_for(lambda: handle.remote(1).result()[1] == ["three/9"])
    assert states(client) == {"9": "AVAILABLE", "10": "READY"}
    assert serve.status().backends["Adder"].models == {"three": {"10": "READY"}}
    received = [each for each in serve.events("default") if each.kind.startswith("MODEL")]
    assert [each.message for each in received[-2:]] == [
        "Version 10 is the default of model 'three'",
        "Version 9 of model 'three' is unloaded",
    ]
    assert all(str(os.getpid()) in each.by for each in received)


def test_replicas_that_start_later_have_the_same_models(folder: Path, client: Client) -> None:
    handle = run(folder, mode="explicit")
    client.load_model("Adder", "four")
    run(folder, mode="explicit", poll_period_s=99)  # replaces the replicas
    assert [handle.remote(1, "four").result() for _ in range(4)] == [(5, [])] * 4


def test_a_model_that_fails_to_load_leaves_the_old_version_serving(folder: Path, client: Client) -> None:
    handle = run(folder, mode="explicit")
    client.load_model("Adder", "three", "9")
    put(folder, "three", "11", "eleven")
    with pytest.raises(DeployError, match="Version 11 of model 'three' could not be loaded: ValueError: inv"):
        client.load_model("Adder", "three")
    assert handle.remote(1).result()[0] == 4
    found = serve.status()
    assert found.applications["default"].status == "RUNNING"
    assert found.backends["Adder"].message.startswith(
        "model 'three' version 11 could not be loaded: ValueErr"
    )
    assert found.backends["Adder"].message.endswith("; version 9 serves")
    received = [(each.kind, each.message) for each in client.events() if each.kind.startswith("MODEL")]
    assert received[0] == ("MODEL_LOADED", "Version 9 of model 'three' is loaded")
    assert received[1][0] == "MODEL_FAILED"
    assert received[1][1].startswith("Version 11 of model 'three' could not be loaded: ValueError: invalid")
    (folder / "three" / "11" / "number").write_text("11")
    assert client.load_model("Adder", "three") == "11", "another attempt"
    assert (handle.remote(1).result()[0], serve.status().backends["Adder"].message) == (12, "")


def test_new_versions_in_a_folder_replace_old_ones(
    folder: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_reconciler, "PERIOD_S", 0.5)
    handle = run(folder, poll_period_s=1)
    assert (handle.remote(1).result()[0], handle.remote(1, "four").result()[0]) == (31, 5)
    put(folder, "three", "11", "300")
    poll_for(lambda: handle.remote(1).result() == (301, ["three/10"]))
    put(folder, "three", "12", "bad")
    poll_for(lambda: states(client) == {"9": "AVAILABLE", "10": "AVAILABLE", "11": "READY", "12": "FAILED"})
    assert handle.remote(1).result()[0] == 301
    with pytest.raises(BadRequestError, match="because mode is 'poll'; set mode='explicit'"):
        client.load_model("Adder", "three")


def test_mistakes_are_explained(folder: Path, client: Client) -> None:
    silent = serve.deployment(Silent).options(model_repository={"url": str(folder)})
    with pytest.raises(ReplicaStartError, match=r"no load_model\(name, version, path\) method"):
        serve.run(silent.bind(), name="silent", route_prefix="/silent")
    with pytest.raises(
        ValueError, match="'models' is a relative path, which may be a different folder on each"
    ):
        serve.deployment(Adder).options(model_repository={"url": "models"})
    run(folder, mode="explicit")
    with pytest.raises(NotFoundError, match=r"Version '8' of model 'three' is not in the .*: 9, 10"):
        client.load_model("Adder", "three", "8")
    for call in (client.unload_model, client.set_default_model):
        with pytest.raises(NotFoundError, match="'three' is not loaded; there are: none"):
            call("Adder", "three", "9")
    serve.run(serve.deployment(Silent).bind(), name="plain", route_prefix="/plain")
    with pytest.raises(
        BadRequestError, match="model_repository of deployment 'Silent' of application 'plain'"
    ):
        client.list_models("plain/Silent")


def test_the_command_lists_loads_and_unloads(folder: Path, client: Client) -> None:
    run(folder, mode="explicit")
    loaded = command("load", "default/Adder", "three", "9")
    assert (loaded.exit_code, loaded.output) == (0, "Version 9 of model three is loaded.\n")
    assert command("load", "Adder", "three", "--no-default").exit_code == 0
    assert command("list", "Adder").output.splitlines() == [
        "MODEL  VERSION  STATE      DEFAULT",
        "four   1        AVAILABLE",
        "three  9        READY      yes",
        "three  10       READY",
    ]
    assert command("default", "Adder", "three", "10").exit_code == 0
    assert json.loads(command("list", "Adder", "--json").output)["three"]["10"]["is_default"]
    assert command("unload", "Adder", "three").exit_code == 0
    assert states(client) == {"9": "AVAILABLE", "10": "AVAILABLE"}
    put(folder, "three", "11", "eleven")
    failed = command("load", "Adder", "three")
    assert (failed.exit_code, "could not be loaded" in failed.output) == (1, True)
    assert command("list", "Adder").exit_code == 1


async def test_the_time_of_a_load_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the controller is replaced meanwhile, a call takes longer than its timeout."""
    now = 0.0

    async def submit(verb: str, **_: Any) -> dict[str, Any]:
        return {"version": "2"}

    async def call(deadline: float, verb: str, **_: Any) -> dict[str, Any]:
        nonlocal now
        now += 60
        return {"state": "LOADING", "reason": ""}

    clock = SimpleNamespace(now=lambda: now)
    connection: Any = SimpleNamespace(cluster_connection=SimpleNamespace(clock=clock))
    verbs = ModelVerbs(connection, asynchronous=True)
    monkeypatch.setattr(verbs, "_submit", submit)
    monkeypatch.setattr(verbs, "_call_until", call)
    with pytest.raises(RequestTimeoutError, match="not loaded within 30 s"):
        await verbs.load_model("d", "m", timeout_s=30)
    assert now == 60
