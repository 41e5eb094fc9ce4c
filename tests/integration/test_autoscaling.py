"""Autoscaling on real clusters: from zero and back, including adaptive clusters."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from clusters import Load, running
from dask_processes import PATIENCE_S, ExternalCluster, fetch, poll_for
from distributed import Client, LocalCluster
from scraping import needs_prometheus
from scraping import prometheus as real_prometheus

import daskserve as serve

EPHEMERAL = {"http_options": {"port": 0}}
START_S = 0.5
#: How much longer than the constructor the first answer at zero replicas may take on a busy machine.
MARGIN_S = 1.0

#: Options with short delays.
QUICK: Mapping[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "look_back_period_s": 2.0,
}


def slow_to_start(start_s: float = START_S, answer_s: float = 0.02) -> Any:
    """Return a class with a slow constructor; it is local, so that it is pickled by value."""

    class Slow:
        def __init__(self) -> None:
            time.sleep(start_s)

        def __call__(self, request: Any = None) -> str:
            time.sleep(answer_s)
            return "done"

    return Slow


def wanted(client: serve.Client) -> int:
    return client.status().backends["b"].wanted


def is_at_zero(client: serve.Client) -> bool:
    return not client.status().replicas("b")


def explanation(client: serve.Client) -> str:
    return str(client.explain("b"))


@pytest.mark.parametrize(
    "server", ["tornado", pytest.param("asyncio", marks=pytest.mark.nightly)], indirect=True
)
def test_scaling_from_zero_and_back_answers_every_request(client: serve.Client, url: str) -> None:
    """Send requests at zero replicas, scale to the maximum under load and back; no request may fail."""
    most = QUICK["max_replicas"]
    client.create_backend("b", slow_to_start(), config={"autoscaling_config": dict(QUICK)})
    client.create_endpoint("e", backend="b", route="/e")
    assert is_at_zero(client)
    began = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        first = pool.submit(fetch, f"{url}/e")
        rest = [pool.submit(fetch, f"{url}/e") for _ in range(49)]
        assert first.result().status == 200
        assert time.monotonic() - began < START_S + MARGIN_S
        assert {each.result().status for each in rest} == {200}
    with Load(url, connections=4 * most) as load:
        poll_for(lambda: len(running(client, "b")) == most, what=lambda: explanation(client))
        load.more()
    assert load.failures == []
    poll_for(lambda: is_at_zero(client), what=lambda: explanation(client))
    assert client.status().backends["b"].status == "HEALTHY"
    events = client.explain("b").events
    assert events[-1].after == 0
    assert events[-1].reason in explanation(client)
    assert fetch(f"{url}/e").status == 200


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


@pytest.mark.nightly
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


@pytest.mark.nightly
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
