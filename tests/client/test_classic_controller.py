"""Rows of the classic controller: batching, shadows, affinity, goals, versions, introspection, long poll."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from dask_processes import fetch

import daskserve as serve


def hello(request: Any) -> str:
    return "hello"


@serve.accept_batch
def batch_size(requests: list[Any]) -> list[int]:
    return [len(requests)] * len(requests)


class Slow:
    def __init__(self) -> None:
        time.sleep(0.5)

    def __call__(self, request: Any) -> str:
        return "slow"


def test_concurrency_defaults_follow_the_callable(client: serve.Client) -> None:
    """CL21"""

    async def asynchronous(request: Any) -> str:
        return "x"

    client.create_backend("plain", hello)
    client.create_backend("async", asynchronous)
    client.create_backend("batched", batch_size, config={"max_batch_size": 6})
    found = {tag: config.max_concurrent_queries for tag, config in client.list_backends().items()}
    assert found == {"plain": 8, "async": 100, "batched": 12}
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        client.update_backend_config("plain", {"max_concurrent_queries": 0})


def test_each_request_of_a_batch_gets_its_own_answer(client: serve.Client) -> None:
    """CL22"""
    client.create_backend("b", batch_size, config={"max_batch_size": 4, "batch_wait_timeout": 2.0})
    client.create_endpoint("e", backend="b")
    handle = client.get_handle("e")
    assert [each.result(10) for each in [handle.remote() for _ in range(4)]] == [4, 4, 4, 4]
    with pytest.raises(ValueError, match="accept_batch"):
        client.create_backend("unmarked", hello, config={"max_batch_size": 4})


def test_a_shard_key_stays_with_its_backend(client: serve.Client, url: str) -> None:
    """CL29"""
    for tag in "ab":
        client.create_backend(tag, lambda request, tag=tag: tag)
    client.create_endpoint("e", backend="a", route="/e")
    client.set_traffic("e", {"a": 0.5, "b": 0.5})
    keys = [f"user-{number}" for number in range(20)]

    def by_http() -> list[str]:
        return [fetch(f"{url}/e", headers={"X-SERVE-SHARD-KEY": key}).text for key in keys]

    first = by_http()
    assert set(first) == {"a", "b"}
    assert by_http() == first
    handle = client.get_handle("e")
    assert [handle.options(shard_key=key).remote().result(10) for key in keys] == first


def test_a_newer_goal_supersedes_the_one_before(client: serve.Client) -> None:
    """CL44, CL45"""
    first = client.create_backend("b", Slow, config={"num_replicas": 2}, blocking=False)
    assert isinstance(first, str)
    assert not client.wait_for_goal(first, timeout_s=0.05)
    assert client.view("num_pending_goals") == 1
    second = client.update_backend_config("b", {"num_replicas": 1}, blocking=False)
    assert second is not None
    assert client.wait_for_goal(first, timeout_s=1.0)
    assert client.wait_for_goal(second)
    assert client.view("num_pending_goals") == 0
    assert [actor.state for actor in client.status().replicas("b")] == ["RUNNING"]
    assert client.update_backend_config("b", {"num_replicas": 1}, blocking=False) is None


def test_the_version_decides_whether_a_deploy_replaces_replicas(client: serve.Client, url: str) -> None:
    """CL40, CL41"""

    def pid(request: Any) -> str:
        return serve.get_current_replica_tag()

    def answer() -> str:
        return fetch(f"{url}/d").text

    client.deploy("d", pid, version="1")
    first = answer()
    assert client.deploy("d", pid, version="1", blocking=False) is None
    client.deploy("d", pid, version="1", config={"max_concurrent_queries": 3})
    assert answer() == first, "another config of the same version does not restart replicas"
    client.deploy("d", pid, version="2", prev_version="1")
    second = answer()
    assert second != first
    with pytest.raises(ValueError, match="does not match with the existing version"):
        client.deploy("d", pid, version="3", prev_version="1")
    with pytest.raises(ValueError, match="no existing deployment"):
        client.deploy("other", pid, version="3", prev_version="1")
    with pytest.raises(ValueError, match="reserved"):
        client.deploy("d", pid, version="__v1__")
    client.deploy("d", pid)
    third = answer()
    assert third != second
    client.deploy("d", pid)
    assert answer() != third, "without a version, every deploy replaces the replicas"


def test_deployments_are_listed_and_deleted(client: serve.Client, url: str) -> None:
    """CL42"""
    client.deploy("one", hello, version="7")
    client.deploy("two", hello, route_prefix="/elsewhere")
    info, route = client.get_deployment_info("one")
    assert (info.name, info.version, info.running, route) == ("one", "7", 1, "/one")
    assert {name: each[1] for name, each in client.list_deployments().items()} == {
        "one": "/one",
        "two": "/elsewhere",
    }
    client.delete_deployment("one")
    assert fetch(f"{url}/one").status == 404
    with pytest.raises(KeyError, match="Deployment one does not exist"):
        client.get_deployment_info("one")
    with pytest.raises(ValueError, match="route_prefix"):
        client.deploy("three", hello, route_prefix="no-slash")


def test_only_public_methods_can_be_called_by_name(client: serve.Client) -> None:
    """CL43"""

    class Two:
        def __call__(self) -> str:
            return "call"

        def other(self, word: str) -> str:
            return word

        def _private(self) -> str:
            return "secret"

    client.deploy("d", Two)
    handle = client.get_handle("d")
    assert handle.other.remote("hi").result(10) == "hi"
    with pytest.raises(AttributeError, match="has no method '_private'"):
        _ = handle._private
    with pytest.raises(serve.errors.ServeError):
        handle.options(method_name="_private").remote().result(10)


def test_the_controller_can_be_inspected(client: serve.Client) -> None:
    """CL54, CL57"""
    client.create_backend("b", hello)
    client.create_endpoint("e", backend="b", route="/e")
    assert set(client.view("get_all_backends")) == {"b"}
    assert client.view("get_all_endpoints")["e"]["route"] == "/e"
    assert client.view("get_http_config")["port"] == 0
    (proxy,) = client.view("get_http_proxies").values()
    assert proxy["is_ready"]
    (tags,) = client.view("all_replica_handles").values()
    assert [tag.partition("#")[0] for tag in tags] == ["b"]
    assert client.view("get_router_config")["/e"]["endpoint"] == "e"
    assert client.view("get_traffic_policies")["e"]["traffic"] == {"b": 1.0}
    assert set(client.view("get_backend_configs")) == {"b"}
    client.report_queue_lengths("mine", {"b": 3})
    assert client.view("queue_lengths") == {"mine": {"b": 3}}
    assert client.view("get_metric_exporter")["kind"] == "prometheus"
    with pytest.raises(KeyError, match="known: "):
        client.view("nonsense")
    snapshot = json.loads(client.snapshot())
    assert (snapshot["b"]["http_route"], snapshot["b"]["version"]) == ("/e", "Unversioned")
    assert (snapshot["b"]["class_name"], snapshot["b"]["status"]) == ("hello", "RUNNING")


def test_a_long_poll_returns_newer_values_at_once_and_otherwise_blocks(client: serve.Client) -> None:
    """CL51, CL52"""
    client.create_backend("b", hello)
    client.create_endpoint("e", backend="b", route="/e")
    first = client.listen_for_change({"routes": None, "endpoint/e": None})
    assert set(first) == {"routes", "endpoint/e"}
    seen = {key: snapshot for key, (snapshot, _) in first.items()}
    changed: dict[str, Any] = {}
    thread = threading.Thread(
        target=lambda: changed.update(client.listen_for_change({"endpoint/e": seen["endpoint/e"]}))
    )
    thread.start()
    client.create_backend("unrelated", hello)
    assert thread.is_alive()
    client.shadow_traffic("e", "unrelated", 0.5)
    thread.join(10)
    assert changed["endpoint/e"][1]["shadows"] == {"unrelated": 0.5}
    assert changed["endpoint/e"][0] > seen["endpoint/e"]


def test_classic_endpoints_and_applications_share_a_proxy(client: serve.Client, url: str) -> None:
    """CL59"""
    client.create_backend("b", hello)
    client.create_endpoint("e", backend="b", route="/classic")
    client.deploy("modern", hello)
    assert [fetch(f"{url}/{path}").text for path in ("classic", "modern")] == ["hello", "hello"]
    with pytest.raises(ValueError, match="is registered there"):
        client.deploy("clash", hello, route_prefix="/classic")
    assert "clash" not in client.list_deployments()
