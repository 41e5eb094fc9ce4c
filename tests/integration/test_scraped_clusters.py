"""Metrics of a real cluster over its HTTP servers: the counts of each process, and totals that survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from clusters import nannied_cluster, pids, running, serve_pids, worker_of
from dask_processes import HERE, ExternalCluster, dask_worker, fetch, poll_for
from scraping import (
    Metrics,
    assert_monotone,
    dashboard,
    needs_prometheus,
    prometheus,
    scrape,
    scraping,
    target_urls,
)

import daskserve as serve

EPHEMERAL = {"http_options": {"port": 0}}


class Model:
    """Counts with its own metric, and fails or waits on request."""

    def __init__(self) -> None:
        self.calls = serve.metrics.Counter("my_calls", "Calls.", tag_keys=("kind",))

    async def __call__(self, request: Any) -> str:
        import asyncio

        kind = request.query_params.get("kind", "good")
        self.calls.inc(tags={"kind": kind})
        if kind == "bad":
            raise ValueError("as requested")
        if kind == "slow":
            await asyncio.Event().wait()
        return str(os.getpid())


def serve_model(client: serve.Client, **config: Any) -> str:
    client.create_backend("model", Model, config={"num_replicas": 2, **config})
    client.create_endpoint("model", backend="model", route="/model")
    return f"{client.http_urls()[0]}/model"


@pytest.mark.smoke
@pytest.mark.parametrize(
    "server", ["tornado", pytest.param("asyncio", marks=pytest.mark.nightly)], indirect=True
)
def test_every_process_counts_its_events(client: serve.Client, external: ExternalCluster) -> None:
    url = serve_model(client)
    me = {"serve_instance": client.instance_name}
    for _ in range(8):
        assert fetch(url).status == 200
    assert fetch(f"{url}?kind=bad").status == 500
    assert fetch(f"{url}?kind=slow", headers={"X-Request-Timeout-Seconds": "0.1"}).status == 408
    assert fetch(url, "DELETE").status == 405
    for number in range(20):
        assert fetch(f"{url}x{number}/nothing").status == 404
    assert client.get_handle("model").remote().result(5)

    metrics = Metrics(external.client)
    on_model = {**me, "route": "/model", "endpoint": "model"}
    for code, count in (("200", 8), ("500", 1), ("408", 1), ("405", 1)):
        assert metrics.total("daskserve_http_requests_total", **on_model, code=code) == count
    assert metrics.values("daskserve_http_requests_total", **me, code="404") == [20]
    assert metrics.total("daskserve_http_request_duration_seconds_count", **on_model) == 11
    assert metrics.total("daskserve_http_errors_total", **on_model, cause="timeout") == 1
    assert metrics.total("daskserve_http_errors_total", **me, cause="no_route") == 20
    assert metrics.total("daskserve_http_timeouts_total", **me) == 1
    deployment = {**me, "deployment": "model"}
    assert metrics.total("daskserve_deployment_requests_total", **deployment) == 11
    assert metrics.total("daskserve_deployment_errors_total", **deployment) == 1
    poll_for(lambda: Metrics(external.client).total("daskserve_deployment_timeouts_total", **deployment) == 1)
    assert metrics.values("daskserve_deployment_wanted_replicas", **deployment) == [2]
    assert metrics.values("daskserve_deployment_status", **deployment, status="HEALTHY") == [1]
    assert metrics.values("daskserve_replica_healthy", **deployment) == [1, 1]
    assert metrics.total("daskserve_deployment_replica_starts_total", **deployment) == 2
    assert metrics.values("daskserve_proxy_status", **me, status="RUNNING") == [1]
    assert metrics.values("daskserve_supervisor_controller_starts_total", **me) == [1]
    assert metrics.total("my_calls_total", **deployment, kind="good") == 9
    replicas = {actor.name for actor in client.status().replicas("model")}
    assert set(metrics.labels("my_calls_total", "replica")) <= replicas
    assert "instance" not in {
        label for series in metrics.by_target.values() for _, pairs in series for label, _ in pairs
    }


@pytest.mark.nightly
def test_counters_never_decrease_when_the_controller_dies() -> None:
    with nannied_cluster(3) as dask, serve.start(dask_client=dask, **EPHEMERAL) as client:
        url = serve_pids(client)
        for _ in range(20):
            assert fetch(f"{url}/e").status == 200
        before = Metrics(dask)
        assert before.values("daskserve_controller_epoch") == [1]
        os.kill(pids(dask)[worker_of(client, "controller")], signal.SIGKILL)
        poll_for(lambda: client.status().epoch > 1)
        poll_for(lambda: len(running(client, "b")) == 2)
        for _ in range(20):
            assert fetch(f"{url}/e").status == 200
        after = Metrics(dask)
        (epoch,) = after.values("daskserve_controller_epoch")
        assert epoch > 1
        assert after.values("daskserve_supervisor_controller_starts_total") == [2]
        assert after.values("daskserve_deployment_status", status="HEALTHY") == [1]
        assert_monotone(before.by_target, after)


def test_scrapes_are_answered_while_an_instance_starts_and_ends(external: ExternalCluster) -> None:
    with serve.start(dask_client=external.client, **EPHEMERAL):
        urls = target_urls(external.client)
        assert len(urls) == 3
    with scraping(urls) as statuses:
        for _ in range(3):
            with serve.start(dask_client=external.client, **EPHEMERAL) as client:
                url = serve_model(client)
                for _ in range(5):
                    fetch(url)
    assert set(statuses) == {200}
    assert len(statuses) > 10
    poll_for(lambda: all(scrape(url) == {} for url in urls))
    assert fetch(f"{dashboard(external.client)}/daskserve/targets").status == 404


@pytest.mark.nightly
def test_targets_follow_the_workers(client: serve.Client, external: ExternalCluster) -> None:
    urls = target_urls(external.client)
    assert len(urls) == 3
    with dask_worker(external.address, external.folder, name="late"):
        poll_for(lambda: len(target_urls(external.client)) == 4)
        (late,) = set(target_urls(external.client)) - set(urls)
        poll_for(lambda: scrape(late) != {})
    poll_for(lambda: target_urls(external.client) == urls)


@pytest.mark.nightly
def test_all_processes_of_a_local_cluster_can_be_scraped() -> None:
    """The local cluster that daskserve starts listens on random loopback ports."""
    program = """
import json, urllib.request, daskserve as serve
from distributed import default_client
client = serve.start(http_options={"port": 0})
port = default_client().scheduler_info()["services"]["dashboard"]
for each in json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/daskserve/targets")):
    url = "http://" + each["targets"][0] + each["labels"]["__metrics_path__"]
    print(each["labels"]["dask_role"], b"daskserve_build_info" in urllib.request.urlopen(url).read())
client.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["scheduler True", "worker True", "worker True"]


@pytest.mark.nightly
def test_workers_in_one_process_are_one_target() -> None:
    program = """
import urllib.request, daskserve as serve
from distributed import Client, LocalCluster
from scraping import Metrics
options = {"n_workers": 2, "processes": False, "dashboard_address": "127.0.0.1:0"}
with LocalCluster(**options) as cluster, Client(cluster) as dask:
    with serve.start(dask_client=dask, http_options={"port": 0}) as client:
        client.create_backend("b", lambda request: "x", config={"num_replicas": 2})
        client.create_endpoint("e", backend="b", route="/e")
        for _ in range(6):
            urllib.request.urlopen(client.http_urls()[0] + "/e").read()
        found = Metrics(dask)
        counted = [found.total(f"daskserve_{name}_requests_total") for name in ("http", "deployment")]
        print(len(found.by_target), *counted, found.values("daskserve_replica_healthy"))
"""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, env=variables
    )
    assert done.stdout == "1 6.0 6.0 [1.0, 1.0]\n", done.stderr


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "daskserve", "metrics", *arguments]


@pytest.mark.nightly
@needs_prometheus
def test_prometheus_discovers_and_scrapes_all_targets(
    client: serve.Client, external: ExternalCluster, tmp_path: Path
) -> None:
    url = serve_model(client)
    for _ in range(7):
        fetch(url)
    configuration = subprocess.run(
        command("scrape-config", dashboard(external.client), "--interval", "1"),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    with prometheus(configuration, tmp_path) as found:
        found.wait_for('up{job="daskserve"} == 1', 3)
        name = client.instance_name
        (requests,) = found.wait_for(
            f'daskserve_http_requests_total{{serve_instance="{name}",code="200"}}', 1
        )
        assert requests["value"][1] == "7"
        assert requests["metric"]["dask_role"] == "worker"
        assert "exported_instance" not in requests["metric"]
        with dask_worker(external.address, external.folder, name="late"):
            found.wait_for('up{job="daskserve"} == 1', 4)
        found.wait_for('up{job="daskserve"}', 3)
        assert found.query('up{job="daskserve"} == 0') == []


@pytest.mark.nightly
@needs_prometheus
def test_prometheus_follows_a_target_file_kept_up_to_date_by_address(
    client: serve.Client, external: ExternalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "targets.json"
    configuration = subprocess.run(
        command("scrape-config", "--file", str(file), "--interval", "1"),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    follow = command("targets", external.address, "--file", str(file), "--follow", "--interval", "0.5")
    follower = subprocess.Popen(follow, stderr=subprocess.DEVNULL)
    try:
        poll_for(file.exists)
        with prometheus(configuration, tmp_path) as found:
            found.wait_for('up{job="daskserve"} == 1', 3)
            with dask_worker(external.address, external.folder, name="late"):
                found.wait_for('up{job="daskserve"} == 1', 4)
            found.wait_for('up{job="daskserve"}', 3)
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 0
    finally:
        follower.kill()
        follower.wait()


@pytest.mark.usefixtures("client")  # another instance, for which this process keeps collecting
def test_a_scheduler_that_closes_with_an_instance_keeps_no_metrics_of_it() -> None:
    with nannied_cluster(2) as dask:
        ended = serve.start(dask_client=dask, name="ends-with-its-scheduler", **EPHEMERAL)
        name = ended.instance_name.encode()
        assert name in prometheus_client.generate_latest(), "the scheduler is in this process"
    assert name not in prometheus_client.generate_latest()


def test_a_program_that_ends_its_instance_keeps_no_metrics_of_it(external: ExternalCluster) -> None:
    client = serve.start(dask_client=external.client, name="ends-with-its-metrics", **EPHEMERAL)
    client.create_backend("b", lambda request: "answer")
    client.create_endpoint("e", backend="b")
    client.get_handle("e").remote().result(5)
    name = client.instance_name.encode()
    assert name in prometheus_client.generate_latest()
    client.shutdown()
    assert name not in prometheus_client.generate_latest()
