"""Autoscaling on real clusters: from zero and back, including adaptive clusters."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from clusters import Load, running
from dask_processes import PATIENCE_S, ExternalCluster, fetch, poll_for
from distributed import Client, LocalCluster
from json_api import json_api
from scaling import (
    MARGIN_S,
    QUICK,
    START_S,
    explanation,
    is_at_zero,
    scale_from_zero_and_back,
    slow_to_start,
    wanted,
)
from scraping import needs_prometheus
from scraping import prometheus as real_prometheus

import daskserve as serve

EPHEMERAL = {"http_options": {"port": 0}}


@pytest.mark.parametrize("server", ["tornado", "uvicorn"], indirect=True)
def test_scaling_from_zero_and_back_answers_every_request(client: serve.Client, url: str) -> None:
    scale_from_zero_and_back(client, url)


def test_a_python_call_wakes_a_backend_at_zero(client: serve.Client) -> None:
    client.create_backend("b", slow_to_start(), config={"autoscaling_config": QUICK})
    client.create_endpoint("e", backend="b")
    handle = client.get_handle("e")
    assert is_at_zero(client)
    began = time.monotonic()
    responses = [handle.remote() for _ in range(20)]
    assert {each.result(PATIENCE_S) for each in responses} == {"done"}
    assert time.monotonic() - began < START_S + MARGIN_S + 20 * 0.02
    poll_for(lambda: is_at_zero(client), what=lambda: explanation(client))


CALLER = """
import sys, time
from distributed import Client
import daskserve as serve
dask = Client(sys.argv[1])
handle = serve.connect().get_handle("e")
calls = [handle.remote() for _ in range(40)]
print("calling", flush=True)
time.sleep(600)
"""


def test_a_killed_program_pins_no_replicas(external: ExternalCluster) -> None:
    with serve.start(detached=True, dask_client=external.client, **EPHEMERAL) as client:
        # More than all replicas take at once, so that some still wait in the program at the kill.
        client.create_backend("b", slow_to_start(0.0, 8.0), config={"autoscaling_config": QUICK})
        client.create_endpoint("e", backend="b")
        command = [sys.executable, "-c", CALLER, external.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            try:
                assert program.stdout is not None
                assert program.stdout.readline() == "calling\n"
                poll_for(lambda: len(running(client, "b")) == 4, what=lambda: explanation(client))
            finally:
                program.kill()
        poll_for(lambda: is_at_zero(client), timeout_s=2 * PATIENCE_S, what=lambda: explanation(client))
        client.shutdown()


def test_a_request_at_zero_that_times_out_gets_408(client: serve.Client, url: str) -> None:
    client.create_backend("b", slow_to_start(2.0), config={"autoscaling_config": QUICK})
    client.create_endpoint("e", backend="b", route="/e")
    assert fetch(f"{url}/e", headers={"X-Request-Timeout-Seconds": "0.5"}).status == 408
    client.delete_endpoint("e")
    client.delete_backend("b", force=True)


def test_a_user_policy_runs_in_the_controller(client: serve.Client) -> None:
    def two(context: serve.AutoscalingContext) -> serve.Decision:
        return serve.Decision(2, "two are company")

    config = {**QUICK, "min_replicas": 1, "upscale_delay_s": 0, "policy": two}
    client.create_backend("b", slow_to_start(0.0), config={"autoscaling_config": config})
    poll_for(lambda: len(running(client, "b")) == 2, what=lambda: explanation(client))
    assert "two are company" in explanation(client)
    assert client.get_backend_config("b").autoscaling_config is not None


@contextmanager
def prometheus(values: dict[str, float]) -> Iterator[str]:
    """Answer like Prometheus, with the value of the requested expression; yield the URL."""

    def answer(path: str, headers: Message) -> tuple[int, Any]:
        result = [{"metric": {}, "value": [time.time(), str(values[path.partition("query=")[2]])]}]
        return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}

    with json_api(answer) as url:
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
        client.create_backend("b", slow_to_start(0.0), config={"autoscaling_config": config})
        values["lag"] = 30.0
        poll_for(lambda: len(running(client, "b")) == 3, what=lambda: explanation(client))
        assert "backlog is 30" in explanation(client)
        values["lag"] = 0.0
        poll_for(lambda: len(running(client, "b")) == 1, what=lambda: explanation(client))


@needs_prometheus
def test_the_policy_reads_a_real_prometheus(client: serve.Client, tmp_path: Path) -> None:
    with real_prometheus("global: {}\n", tmp_path) as server:
        server.wait_for("vector(1)", 1)
        config = {
            **QUICK,
            "min_replicas": 1,
            "policy": "promql",
            "policy_kwargs": {"targets": {"backlog": 10}},
            "prometheus_address": server.url,
            "prometheus_queries": {"backlog": "sum(vector(7) + vector(23))"},
            "prometheus_interval_s": 0.2,
        }
        client.create_backend("b", slow_to_start(0.0), config={"autoscaling_config": config})
        poll_for(lambda: len(running(client, "b")) == 3, what=lambda: explanation(client))
        config["prometheus_queries"] = {"backlog": "no_such_series"}
        client.update_backend_config("b", {"autoscaling_config": config})
        poll_for(lambda: "no fresh value of backlog" in explanation(client), what=lambda: explanation(client))
        assert wanted(client) == 3


def measuring(file: Path) -> Any:
    """Return a class that reports the number in a file as its statistics, and hangs while it says "hang"."""

    class Measuring:
        async def record_autoscaling_stats(self) -> dict[str, float]:
            value = file.read_text()  # noqa: ASYNC240 - a few bytes
            if value == "hang":
                await asyncio.sleep(1000)
            return {"backlog": float(value)}

        def __call__(self, request: Any = None) -> str:
            return "done"

    return Measuring


@pytest.mark.parametrize("isolation", ["thread", "process"])
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
    poll_for(
        lambda: "max of backlog over 1 replicas is 4" in explanation(client), what=lambda: explanation(client)
    )
    file.write_text("28")
    poll_for(lambda: len(running(client, "b")) == 3, what=lambda: explanation(client))
    poll_for(lambda: "over 3 replicas is 28" in explanation(client), what=lambda: explanation(client))
    file.write_text("hang")
    poll_for(
        lambda: "none of 3 replicas reports backlog" in explanation(client), what=lambda: explanation(client)
    )
    assert wanted(client) == 3
    assert client.get_handle("e").remote().result(PATIENCE_S) == "done"
    file.write_text("4")
    poll_for(lambda: len(running(client, "b")) == 1, what=lambda: explanation(client))
    assert not client.status().unresponsive_workers


def test_an_adaptive_cluster_grows_with_the_load_and_shrinks_again() -> None:
    config = {**QUICK, "min_replicas": 1}
    with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0") as cluster:
        with Client(cluster, set_as_default=False) as dask:
            cluster.adapt(minimum=1, maximum=4, interval="200ms", wait_count=2)
            with serve.start(dask_client=dask, http_options={"port": 0}) as client:
                client.create_backend(
                    "b",
                    slow_to_start(0.0),
                    config={"autoscaling_config": config},
                    actor_options={"num_cpus": 2},
                )
                client.create_endpoint("e", backend="b", route="/e")

                def workers() -> int:
                    return len(dask.scheduler_info(n_workers=-1)["workers"])

                assert workers() == 1
                with Load(client.http_urls()[0], connections=16) as load:
                    poll_for(lambda: len(running(client, "b")) == 4, 40, what=lambda: explanation(client))
                    assert len(set(running(client, "b"))) == 4
                    assert workers() == 4
                    load.more()
                with Load(client.http_urls()[0], connections=1) as gentle:
                    poll_for(lambda: workers() == 1, 40, what=lambda: f"{workers()}: {explanation(client)}")
                    gentle.more()
                assert load.failures == gentle.failures == []
                assert len(running(client, "b")) == 1
