"""External scaling over the HTTP server of a real scheduler."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any
from urllib.parse import quote

import pytest
from clusters import nannied_cluster, pids, running, worker_of
from dask_processes import ExternalCluster, Reply, fetch, poll_for, within
from distributed import Client
from scraping import dashboard

import daskserve as serve

OPEN = {"num_replicas": 1, "external_scaler_enabled": True}
#: Maximum time until an answer, whatever happens to the controller.
LONGEST_S = 10.0


def answer(request: Any = None) -> str:
    return "done"


def path_of(instance: str, name: str, application: str = "default") -> str:
    below = f"applications/{quote(application)}/deployments/{quote(name)}/scale"
    return f"/daskserve/{quote(instance)}/api/v1/{below}"


def ask(dask: Client, client: serve.Client, name: str, number: int, application: str = "default") -> Reply:
    url = f"{dashboard(dask)}{path_of(client.instance_name, name, application)}"
    body = json.dumps({"target_num_replicas": number}).encode()
    return fetch(url, "POST", body=body, headers={"Content-Type": "application/json"}, timeout_s=30)


def wait_for(client: serve.Client, name: str, number: int) -> None:
    poll_for(lambda: len(running(client, name)) == number, what=lambda: str(client.explain(name)))


def test_the_scale_route_reaches_the_controller_of_its_instance(external: ExternalCluster) -> None:
    dask = external.client
    with (
        serve.start(dask_client=dask, name="first one", http_options={"port": 0}) as client,
        serve.start(dask_client=dask, http_options={"host": None}) as other,
    ):
        for each in (client, other):
            each.create_backend("b", answer, config=OPEN)
        client.create_backend("closed", answer)
        model = serve.deployment(name="model", external_scaler_enabled=True)(answer)
        client.run(model.bind(), name="shöp", route_prefix=None)
        reply = ask(dask, client, "b", 3)
        assert (reply.status, reply.json["target_num_replicas"]) == (200, 3)
        wait_for(client, "b", 3)
        assert len(running(other, "b")) == 1
        assert ask(dask, client, "b", 3).status == 200
        assert len(client.explain("b").events) == 1
        reply = ask(dask, client, "model", 2, application="shöp")
        assert reply.json["message"] == "model of application shöp is to have 2 replicas."
        wait_for(client, "shöp/model", 2)
        for name, number, status in (("b", 0, 400), ("none", 2, 404), ("closed", 2, 412)):
            assert ask(dask, client, name, number).status == status
        other.shutdown()
        assert ask(dask, other, "b", 2).status == 404
        client.shutdown()
        reply = ask(dask, client, "b", 2)
        assert (reply.status, "does not run" in reply.text) == (404, False)  # the route itself is gone
    assert fetch(f"{dashboard(dask)}/health").status == 200


@pytest.mark.nightly
def test_the_number_is_recorded_even_if_the_controller_dies() -> None:
    with nannied_cluster(3) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        client.create_backend("b", answer, config={**OPEN, "num_replicas": 2})
        assert ask(dask, client, "b", 3).status == 200
        wait_for(client, "b", 3)
        os.kill(pids(dask)[worker_of(client, "controller")], signal.SIGKILL)
        statuses: list[int] = []
        deadline = time.monotonic() + 40
        while not statuses or statuses[-1] != 200:
            with within(LONGEST_S):
                reply = ask(dask, client, "b", 4)
            statuses.append(reply.status)
            assert reply.status in (200, 503), reply.text
            assert (reply.status == 503) == ("retry-after" in reply.headers)
            assert time.monotonic() < deadline
        wait_for(client, "b", 4)
        assert client.explain("b").events[-1].after == 4
