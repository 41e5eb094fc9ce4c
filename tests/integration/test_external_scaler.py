"""External scaling on real clusters: over the scheduler's HTTP server and from Python."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from clusters import nannied_cluster, pids, running, worker_of
from dask_processes import ExternalCluster, Reply, fetch, poll_for, within
from distributed import Client
from scraping import dashboard

import daskserve as serve
from daskserve.errors import BadRequestError, ExternalScalerDisabledError, NotFoundError, NotRunningError

OPEN = {"num_replicas": 1, "external_scaler_enabled": True}
EPHEMERAL: dict[str, Any] = {"http_options": {"port": 0}}
#: Maximum time of an answer, whatever happens to the controller.
LONGEST_S = 10.0


def answer(request: Any = None) -> str:
    return "done"


def path_of(instance: str, name: str, application: str = "default") -> str:
    below = f"applications/{quote(application)}/deployments/{quote(name)}/scale"
    return f"/daskserve/{quote(instance)}/api/v1/{below}"


def post(dask: Client, path: str, body: bytes, method: str = "POST") -> Reply:
    headers = {"Content-Type": "application/json"}
    return fetch(f"{dashboard(dask)}{path}", method, body=body, headers=headers, timeout_s=30)


def ask(dask: Client, client: serve.Client, name: str, number: Any, application: str = "default") -> Reply:
    body = json.dumps({"target_num_replicas": number}).encode()
    return post(dask, path_of(client.instance_name, name, application), body)


def wait_for(client: serve.Client, name: str, number: int) -> None:
    poll_for(lambda: len(running(client, name)) == number, what=lambda: str(client.explain(name)))


def test_every_http_status_of_the_scale_route(external: ExternalCluster) -> None:
    dask = external.client
    with (
        serve.start(dask_client=dask, name="first one", http_options={"port": 0}) as client,
        serve.start(dask_client=dask, http_options={"host": None}) as other,
    ):
        client.create_backend("b", answer, config=OPEN)
        client.create_backend("closed", answer)
        other.create_backend("b", answer, config=OPEN)
        client.deploy("déployé", answer, version="1", config=OPEN)
        model = serve.deployment(name="model", external_scaler_enabled=True)(answer)
        client.run(model.bind(), name="shöp", route_prefix=None)
        reply = ask(dask, client, "b", 3)
        assert (reply.status, reply.json["target_num_replicas"]) == (200, 3)
        wait_for(client, "b", 3)
        assert len(running(other, "b")) == 1
        assert ask(dask, client, "b", 3).status == 200
        assert len(client.explain("b").events) == 1
        assert ask(dask, client, "déployé", 2, application="déployé").status == 200
        wait_for(client, "déployé", 2)

        reply = ask(dask, client, "model", 2, application="shöp")
        assert (reply.status, reply.json["message"]) == (
            200,
            "model of application shöp is to have 2 replicas.",
        )
        wait_for(client, "shöp/model", 2)
        assert client.scale("shöp/model", 1) == 1
        assert ask(dask, client, "model", 2).status == 404

        path = path_of(client.instance_name, "b")
        for body in (b"", b"{", b"[]", b"{}", b" " * 5000, b'{"target_num_replicas": 0}'):
            assert post(dask, path, body).status == 400, body
        for number in (-1, 0, 1.5, 10**6, 10**30, True, None, "2"):
            assert ask(dask, client, "b", number).status == 400, number
        assert "10000" in ask(dask, client, "b", -1).json["message"]
        assert ask(dask, client, "none", 2).status == 404
        assert ask(dask, client, "b", 2, application="another").status == 404
        assert post(dask, path_of("nowhere", "b"), b'{"target_num_replicas": 2}').status == 404
        reply = ask(dask, client, "closed", 2)
        assert (reply.status, "external_scaler_enabled=True" in reply.json["message"]) == (412, True)
        reply = post(dask, path, b"", "GET")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert (
            fetch(f"{dashboard(dask)}{path}", "POST", body=b"", headers={"Origin": "http://x"}).status == 403
        )
        assert wanted(client) == {"b": 3, "closed": 1, "déployé": 2, "shöp/model": 1}

        other.shutdown()
        assert ask(dask, other, "b", 2).status == 404
        assert ask(dask, client, "b", 2).status == 200
        client.shutdown()
        reply = ask(dask, client, "b", 2)
        assert (reply.status, "does not run" in reply.text) == (404, False)  # the route itself is gone
    assert fetch(f"{dashboard(dask)}/health").status == 200


def wanted(client: serve.Client) -> dict[str, int]:
    return {name: each.wanted for name, each in client.status().backends.items()}


def test_scaling_from_python_behaves_like_http(client: serve.Client) -> None:
    client.create_backend("b", answer, config=OPEN)
    client.create_backend("closed", answer)
    assert client.scale("b", 3) == 3
    wait_for(client, "b", 3)
    client.update_backend_config("b", {"max_queued_requests": 7})
    assert wanted(client)["b"] == 3
    for number in (0, -1, 2.5, "3", True):
        with pytest.raises(BadRequestError, match="target_num_replicas is"):
            client.scale("b", number)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no backend or deployment 'none'"):
        client.scale("none", 2)
    with pytest.raises(ExternalScalerDisabledError, match="'closed' does not allow external scaling"):
        client.scale("closed", 2)
    with pytest.raises(BadRequestError, match="only one of them"):
        client.update_backend_config("b", {"autoscaling_config": {"max_replicas": 3}})
    assert wanted(client) == {"b": 3, "closed": 1}


def test_serve_scale_scales_the_instance_of_serve_run(external: ExternalCluster) -> None:
    with Client(external.address):
        serve.run(serve.deployment(name="d", external_scaler_enabled=True)(answer).bind(), **EPHEMERAL)
        try:
            assert serve.scale("d", 2) == 2
            poll_for(lambda: serve.status().backends["d"].running == 2)
            assert "An external scaler sets the number" in str(serve.explain("d"))
        finally:
            serve.shutdown()
        with pytest.raises(NotRunningError):
            serve.scale("d", 2)


def test_invalid_and_endless_requests_do_not_affect_others(
    external: ExternalCluster, client: serve.Client
) -> None:
    client.create_backend("b", answer, config=OPEN)
    parts = urlsplit(dashboard(external.client))
    path = path_of(client.instance_name, "b")
    start = f"POST {path} HTTP/1.1\r\nHost: h\r\n"
    open_ones = []
    for text in (
        f"{start}Content-Length: 1000000\r\n\r\n{{",
        f"{start}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        f"{start}Content-Length: -1\r\n\r\n",
        f"{start}Content-Length: 99999999999\r\n\r\n",
        f"{start}Transfer-Encoding: chunked\r\n\r\n" + "1\r\n \r\n" * 10_000,
        f"{start.replace(client.instance_name, '%ff%00')}\r\n",
    ):
        connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
        connection.sendall(text.encode())
        open_ones.append(connection)
    assert ask(external.client, client, "b", 2).status == 200
    wait_for(client, "b", 2)
    for connection in open_ones:
        connection.close()
    assert fetch(f"{dashboard(external.client)}/health").status == 200


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_the_number_is_recorded_even_if_the_controller_dies(sign: signal.Signals) -> None:
    with nannied_cluster(3) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        client.create_backend("b", answer, config={**OPEN, "num_replicas": 2})
        assert ask(dask, client, "b", 3).status == 200
        wait_for(client, "b", 3)
        victim = pids(dask)[worker_of(client, "controller")]
        os.kill(victim, sign)
        try:
            statuses = []
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
        finally:
            if sign is signal.SIGSTOP:
                try:
                    os.kill(victim, signal.SIGCONT)
                except ProcessLookupError:
                    pass  # its nanny has restarted it


@pytest.mark.nightly
def test_without_workers_the_answer_is_503_in_time() -> None:
    with nannied_cluster(1) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        client.create_backend("b", answer, config=OPEN)
        (victim,) = pids(dask).values()
        os.kill(victim, signal.SIGSTOP)
        try:
            with within(LONGEST_S):
                reply = ask(dask, client, "b", 2)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            with within(1.0):  # the scheduler's event loop is not blocked
                assert fetch(f"{dashboard(dask)}/health").status == 200
        finally:
            os.kill(victim, signal.SIGCONT)
        poll_for(lambda: ask(dask, client, "b", 2).status == 200, 40)
        wait_for(client, "b", 2)
