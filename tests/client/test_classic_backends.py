"""Backends in the classic API: create, configure, delete (rows CL18 to CL20 and CL23 to CL26)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest
from dask_processes import fetch, poll_for
from starlette.requests import Request

import daskserve as serve


def replicas_of(client: serve.Client, tag: str) -> list[str]:
    return [each.name for each in client.status().replicas(tag)]


class Configured:
    """Returns its process id and its user_config."""

    def __init__(self) -> None:
        self.value: Any = "not configured"

    def reconfigure(self, user_config: Any) -> None:
        self.value = user_config["value"]

    def __call__(self, request: Any) -> list[Any]:
        return [os.getpid(), id(self), self.value]


def test_all_kinds_of_definitions_answer(client: serve.Client, url: str) -> None:
    """CL18: a function, a class with arguments and an import path (of either) answer over HTTP."""

    async def in_a_coroutine(request: Request) -> str:
        return f"async {request.query_params['text']}"

    class Prefixed:
        def __init__(self, prefix: str, *, mark: str = "?") -> None:
            self.prefix, self.mark = prefix, mark

        def __call__(self, request: Any) -> str:
            return f"{self.prefix} {request.query_params['text']}{self.mark}"

    client.create_backend("function", lambda request: f"function {request.query_params['text']}")
    client.create_backend("coroutine", in_a_coroutine)
    client.create_backend("class", Prefixed, "class", mark="!")
    client.create_backend("path", "served.echo")
    client.create_backend("path-of-class", "served.Counter", 41)
    for tag in client.list_backends():
        client.create_endpoint(tag, backend=tag, route=f"/{tag}")
    answers = {tag: fetch(f"{url}/{tag}?text=hi") for tag in client.list_backends()}
    assert {each.status for each in answers.values()} == {200}
    assert answers["function"].text == "function hi"
    assert answers["coroutine"].text == "async hi"
    assert answers["class"].text == "class hi!"
    assert answers["path"].text == "hi"
    assert answers["path-of-class"].json[1] == 42


def test_actor_options_accept_their_old_name(client: serve.Client) -> None:
    """CL18: ``ray_actor_options`` is accepted as ``actor_options``."""
    client.create_backend("half", lambda request: "", ray_actor_options={"num_cpus": 0.5})
    with pytest.raises(ValueError, match="num_cups"):
        client.create_backend("typo", lambda request: "", ray_actor_options={"num_cups": 1})


def test_a_registered_tag_cannot_be_registered_again(client: serve.Client) -> None:
    """CL19: a taken tag raises a ValueError, and the existing backend is unchanged."""
    client.create_backend("taken", "served.Counter")
    (replica,) = replicas_of(client, "taken")
    with pytest.raises(ValueError, match=r"^Cannot create backend\. Backend 'taken' is already registered"):
        client.create_backend("taken", "served.Counter")
    assert replicas_of(client, "taken") == [replica]


def test_create_backend_refuses_invalid_arguments(client: serve.Client) -> None:
    """CL19: wrong types and values raise before anything is created."""

    class NotCallable:
        pass

    with pytest.raises(TypeError, match="config must be a BackendConfig"):
        client.create_backend("bad", "served.echo", config=[("num_replicas", 1)])  # type: ignore[arg-type]
    for options in ({"num_replica": 2}, {"num_replicas": 0}, {"max_concurrent_queries": 0}):
        with pytest.raises(pydantic.ValidationError, match=next(iter(options))):
            client.create_backend("bad", "served.echo", config=options)
    with pytest.raises(ValueError, match="init arguments"):
        client.create_backend("bad", lambda request: "", 1)
    for definition in (NotCallable(), 42, None):
        with pytest.raises(TypeError, match="Backend definition must be a function, a class"):
            client.create_backend("bad", definition)
    with pytest.raises(TypeError, match="backend_tag"):
        client.create_backend(42, "served.echo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'a#b'"):
        client.create_backend("a#b", "served.echo")
    with pytest.raises(ValueError, match="conda environment 'nowhere'"):
        client.create_backend("bad", "served.echo", env="nowhere")
    assert client.list_backends() == {}


def test_defaults_of_the_backend_config(client: serve.Client) -> None:
    """CL20: missing options have their classic defaults."""
    client.create_backend("plain", "served.Counter")
    config = client.get_backend_config("plain")
    assert config.num_replicas == 1
    assert config.max_batch_size is None
    assert config.batch_wait_timeout == 0
    assert config.user_config is None
    assert config.experimental_graceful_shutdown_wait_loop_s == 2
    assert config.experimental_graceful_shutdown_timeout_s == 20
    assert config.max_concurrent_queries == 8


def test_an_update_keeps_options_that_it_does_not_name(client: serve.Client) -> None:
    """CL23: an update merges, as a dict and as a BackendConfig."""
    client.create_backend("merged", Configured, config={"user_config": {"value": 1}})
    client.update_backend_config("merged", {"num_replicas": 2})
    assert len(replicas_of(client, "merged")) == 2
    client.update_backend_config("merged", serve.config.BackendConfig(max_concurrent_queries=3))
    config = client.get_backend_config("merged")
    assert config.user_config == {"value": 1}
    assert (config.num_replicas, config.max_concurrent_queries) == (2, 3)


def test_scaling_is_complete_when_the_call_returns(client: serve.Client) -> None:
    """CL23: scaling up and down is complete."""
    client.create_backend("scaled", "served.Counter", config={"num_replicas": 3})
    states = {each.state for each in client.status().replicas()}
    assert (len(replicas_of(client, "scaled")), states) == (3, {"RUNNING"})
    client.update_backend_config("scaled", {"num_replicas": 1})
    assert len(replicas_of(client, "scaled")) == 1


def test_invalid_updates_are_refused(client: serve.Client) -> None:
    """CL23: a wrong type raises a TypeError; an unknown tag and invalid options raise ValueErrors."""
    client.create_backend("known", "served.echo")
    for options in (None, 2, [("num_replicas", 2)]):
        with pytest.raises(TypeError, match="must be a BackendConfig or a dict"):
            client.update_backend_config("known", options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Backend unknown is not registered"):
        client.update_backend_config("unknown", {"num_replicas": 2})
    with pytest.raises(ValueError, match="num_replicas"):
        client.update_backend_config("known", {"num_replicas": -1})
    assert client.get_backend_config("known").num_replicas == 1


def test_user_config_reaches_the_running_replicas(client: serve.Client, url: str) -> None:
    """CL24: ``reconfigure`` runs at the start and on updates, on the same object in the same process."""
    client.create_backend("conf", Configured, config={"user_config": {"value": "at start"}})
    client.create_endpoint("conf", backend="conf", route="/conf")
    pid, instance, value = fetch(f"{url}/conf").json
    assert value == "at start"
    client.update_backend_config("conf", {"user_config": {"value": "later"}})
    assert fetch(f"{url}/conf").json == [pid, instance, "later"]


def test_a_user_config_without_reconfigure_is_refused(client: serve.Client) -> None:
    """CL24: creation and updates raise a ServeError that names the reason; a running backend is unchanged."""
    with pytest.raises(serve.errors.ServeError, match="reconfigure"):
        client.create_backend("none", "served.Counter", config={"user_config": 1})
    assert client.list_backends() == {}
    client.create_backend("none", "served.Counter")
    with pytest.raises(serve.errors.ServeError, match="reconfigure"):
        client.update_backend_config("none", {"user_config": 1})
    assert client.get_backend_config("none").user_config is None


def test_a_failing_reconfigure_raises_and_is_rolled_back(client: serve.Client, url: str) -> None:
    """CL24: the caller gets the error of user code, and the old config stays."""
    client.create_backend("conf", Configured, config={"user_config": {"value": "good"}})
    client.create_endpoint("conf", backend="conf", route="/conf")
    with pytest.raises(serve.errors.ServeError, match="KeyError: 'value'") as caught:
        client.update_backend_config("conf", {"user_config": {"wrong": 1}})
    assert "in reconfigure" in caught.value.user_traceback
    assert client.get_backend_config("conf").user_config == {"value": "good"}
    assert fetch(f"{url}/conf").json[2] == "good"


def test_configs_round_trip(client: serve.Client) -> None:
    """CL25: configs are returned as they were set, one at a time and in the list; an unknown tag raises."""
    config = serve.config.BackendConfig(
        num_replicas=2, max_concurrent_queries=5, user_config={"value": [1, 2]}
    )
    client.create_backend("round", Configured, config=config)
    client.create_backend("other", "served.echo")
    found = client.get_backend_config("round")
    for name in config.model_fields_set:
        assert getattr(found, name) == getattr(config, name)
    listed = client.list_backends()
    assert sorted(listed) == ["other", "round"]
    assert listed["round"] == found
    with pytest.raises(ValueError, match="Backend unknown is not registered"):
        client.get_backend_config("unknown")


def test_a_backend_in_use_cannot_be_deleted(client: serve.Client) -> None:
    """CL26: neither while an endpoint sends it traffic, nor while it only gets shadow traffic."""
    client.create_backend("used", "served.echo")
    client.create_backend("shadow", "served.echo")
    client.create_endpoint("user", backend="used", route="/user")
    client.shadow_traffic("user", "shadow", 0.5)
    for tag in ("used", "shadow"):
        with pytest.raises(ValueError, match=f"'{tag}' is used by endpoint 'user' and cannot be deleted"):
            client.delete_backend(tag)
        with pytest.raises(ValueError, match="cannot be deleted"):
            client.delete_backend(tag, force=True)
    client.delete_endpoint("user")
    client.delete_backend("used")
    client.delete_backend("shadow")
    client.delete_backend("shadow")  # the tag is unknown by now
    assert client.list_backends() == {}
    assert client.status().replicas() == ()


class Waiting:
    """Creates a file when it begins, and waits until another file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, request: Any) -> str:
        (self.folder / "begun").touch()
        poll_for((self.folder / "go").exists)
        return "done"


def test_a_forced_delete_does_not_wait(client: serve.Client, tmp_path: Path) -> None:
    """CL26: with force, it returns quickly, and the request in flight fails."""
    client.create_backend("waiting", Waiting, tmp_path)
    client.create_endpoint("waiting", backend="waiting")
    response = client.get_handle("waiting").remote()
    poll_for((tmp_path / "begun").exists)
    client.delete_endpoint("waiting")
    started = time.monotonic()
    client.delete_backend("waiting", force=True)
    assert time.monotonic() - started < 3
    assert client.list_backends() == {}
    with pytest.raises(serve.errors.ServeError):
        response.result(5)
    (tmp_path / "go").touch()


def test_a_graceful_delete_lets_requests_finish(client: serve.Client, tmp_path: Path) -> None:
    """CL26: without force, requests in flight are answered first."""
    client.create_backend("waiting", Waiting, tmp_path)
    client.create_endpoint("waiting", backend="waiting")
    response = client.get_handle("waiting").remote()
    poll_for((tmp_path / "begun").exists)
    client.delete_endpoint("waiting")
    deleting = threading.Thread(target=client.delete_backend, args=("waiting",))
    deleting.start()
    (tmp_path / "go").touch()
    assert response.result(10) == "done"
    deleting.join(10)
    assert not deleting.is_alive()
    assert client.list_backends() == {}
