"""Autoscaling with real controllers, routers and replicas, in one process and on a faster clock."""

from __future__ import annotations

import asyncio
import http.client
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from json_api import json_api
from quick_instance import TIMEOUT_S, explained, poll_for, quick_instance, running

import daskserve as serve

QUICK: Mapping[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "look_back_period_s": 2.0,
}
GROUPED: Mapping[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 8,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
    "look_back_period_s": 1.0,
    "metrics_interval_s": 0.2,
}


@pytest.fixture
def client() -> Iterator[serve.Client]:
    with quick_instance() as client:
        yield client


def answer(request: Any = None) -> str:
    return "done"


def get(client: serve.Client, path: str, **headers: str) -> tuple[int, str]:
    (url,) = client.http_urls()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=TIMEOUT_S)
    try:
        connection.request(
            "GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def slow_to_start(start_s: float) -> Any:
    class Slow:
        def __init__(self) -> None:
            time.sleep(start_s)

        def __call__(self, request: Any = None) -> str:
            return "done"

    return Slow


# ---- from and to zero


def test_a_python_call_wakes_a_backend_at_zero(client: serve.Client) -> None:
    client.create_backend("b", slow_to_start(0.05), config={"autoscaling_config": dict(QUICK)})
    client.create_endpoint("e", backend="b")
    handle = client.get_handle("e")
    assert running(client) == 0
    responses = [handle.remote() for _ in range(20)]
    assert {each.result(TIMEOUT_S) for each in responses} == {"done"}
    poll_for(lambda: not client.status().replicas("b"), what=lambda: explained(client))


def test_a_request_at_zero_that_times_out_gets_408() -> None:
    with quick_instance(http_options={"port": 0}) as client:
        client.create_backend("b", slow_to_start(0.5), config={"autoscaling_config": dict(QUICK)})
        client.create_endpoint("e", backend="b", route="/e")
        assert get(client, "/e", X_Request_Timeout_Seconds="0.5")[0] == 408
        client.delete_endpoint("e")
        client.delete_backend("b", force=True)


# ---- policies


def test_a_user_policy_runs_in_the_controller(client: serve.Client) -> None:
    def two(context: serve.autoscaling.AutoscalingContext) -> serve.autoscaling.Decision:
        return serve.autoscaling.Decision(2, "two are company")

    config = {**QUICK, "min_replicas": 1, "upscale_delay_s": 0, "policy": two}
    client.create_backend("b", answer, config={"autoscaling_config": config})
    poll_for(lambda: running(client) == 2, what=lambda: explained(client))
    assert "two are company" in explained(client)
    assert client.get_backend_config("b").autoscaling_config is not None


@contextmanager
def prometheus(values: dict[str, float]) -> Iterator[str]:
    """Run a server that answers like Prometheus, with the value of the requested expression."""

    def reply(path: str, headers: Message) -> tuple[int, Any]:
        result = [{"metric": {}, "value": [time.time(), str(values[path.partition("query=")[2]])]}]
        return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}

    with json_api(reply) as url:
        yield url


def test_a_prometheus_query_decides(client: serve.Client) -> None:
    values = {"lag": 10.0}
    with prometheus(values) as address:
        config = {
            **QUICK,
            "min_replicas": 1,
            "policy": "promql",
            "policy_kwargs": {"targets": {"backlog": 10}},
            "prometheus_address": address,
            "prometheus_queries": {"backlog": "lag"},
            "prometheus_interval_s": 0.2,
        }
        client.create_backend("b", answer, config={"autoscaling_config": config})
        values["lag"] = 30.0
        poll_for(lambda: running(client) == 3, what=lambda: explained(client))
        assert "backlog is 30" in explained(client)
        values["lag"] = 0.0
        poll_for(lambda: running(client) == 1, what=lambda: explained(client))


def measuring(file: Path) -> Any:
    """Return a class that reports the number in a file as a custom metric, and hangs if the file says so."""

    class Measuring:
        async def record_autoscaling_stats(self) -> dict[str, float]:
            value = file.read_text()
            if value == "hang":
                await asyncio.sleep(1000)
            return {"backlog": float(value)}

        def __call__(self, request: Any = None) -> str:
            return "done"

    return Measuring


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.nightly)])
def test_statistics_of_user_code_decide(client: serve.Client, tmp_path: Path, isolation: str) -> None:
    file = tmp_path / "backlog"
    file.write_text("4")
    config = {
        **QUICK,
        "min_replicas": 1,
        "policy": "custom_metric",
        "policy_kwargs": {"metric": "backlog", "target": 10, "across": "max"},
    }
    client.create_backend("b", measuring(file), config={"autoscaling_config": config, "isolation": isolation})
    client.create_endpoint("e", backend="b")

    def wait_for(text: str) -> None:
        poll_for(lambda: text in explained(client), what=lambda: explained(client))

    wait_for("max of backlog over 1 replica is 4")
    file.write_text("28")
    poll_for(lambda: running(client) == 3, what=lambda: explained(client))
    wait_for("over 3 replicas is 28")
    file.write_text("hang")
    wait_for("none of 3 replicas reports backlog")
    assert client.status().backends["b"].wanted == 3
    assert client.get_handle("e").remote().result(TIMEOUT_S) == "done"
    file.write_text("4")
    poll_for(lambda: running(client) == 1, what=lambda: explained(client))
    assert not client.status().unresponsive_workers


# ---- several backends together


def test_two_backends_are_scaled_by_one_policy(client: serve.Client, tmp_path: Path) -> None:
    file = tmp_path / "wanted"
    file.write_text("2")

    def decide(contexts: Mapping[str, Any]) -> dict[str, int]:
        wanted = int(file.read_text())
        return {"a": wanted, "b": 2 * wanted} if len(contexts) == 2 else {}

    for tag in "ab":
        config = {**GROUPED, "group": "pair", "policy": decide}
        client.create_backend(tag, answer, config={"autoscaling_config": config})

    def both() -> tuple[int, int]:
        return running(client, "a"), running(client, "b")

    def explanation() -> str:
        return f"{explained(client, 'a')}\n{explained(client, 'b')}"

    for wanted in (2, 4, 1):
        file.write_text(str(wanted))
        poll_for(lambda wanted=wanted: both() == (wanted, 2 * wanted), what=explanation)
    assert "of group 'pair'" in explanation()
    file.write_text("many")
    poll_for(lambda: "the policy failed: ValueError" in explanation(), what=explanation)
    assert both() == (1, 2)
    # After a backend leaves the group, each of the two is scaled alone.
    client.update_backend_config("b", {"autoscaling_config": {**GROUPED, "min_replicas": 3}})
    poll_for(lambda: both() == (1, 3), what=explanation)
    assert client.explain("b").group == ""


def test_the_target_capacity_scales_all_backends() -> None:
    with quick_instance(http_options={"port": 0}) as client:
        client.create_backend("fixed", answer, config={"num_replicas": 5})
        client.create_endpoint("e", backend="fixed", route="/e")
        config = {**GROUPED, "min_replicas": 2, "multiple_of": 2}
        client.create_backend("scaled", answer, config={"autoscaling_config": config})

        def both() -> tuple[int, int]:
            return running(client, "fixed"), running(client, "scaled")

        def status() -> str:
            return str(client.status())

        assert both() == (5, 2)
        client.set_target_capacity(50)
        poll_for(lambda: both() == (3, 2), what=status)
        assert get(client, "/e")[0] == 200
        assert "target capacity of 50 %, DOWN" in explained(client, "fixed")
        client.set_target_capacity(0)
        poll_for(lambda: both() == (0, 0), what=status)
        code, body = get(client, "/e")
        assert code == 503
        assert "the target capacity of its instance is 0 %" in body
        with pytest.raises(serve.errors.UnavailableError, match="target capacity"):
            client.get_handle("e").remote().result(TIMEOUT_S)
        assert {each.status for each in client.status().backends.values()} == {"HEALTHY"}
        client.set_target_capacity(100)
        assert get(client, "/e")[0] == 200
        poll_for(lambda: both() == (5, 2), what=status)
        client.set_target_capacity(None)
        assert (client.status().target_capacity, client.status().target_capacity_direction) == (None, None)
        assert client.get_backend_config("fixed").num_replicas == 5


@pytest.mark.parametrize("percent", [-1, 101, math.nan, "50", True])
def test_an_invalid_percentage_is_refused(client: serve.Client, percent: Any) -> None:
    with pytest.raises(ValueError, match="give a percentage from 0 to 100, or None for all"):
        client.set_target_capacity(percent)
    assert client.status().target_capacity is None
