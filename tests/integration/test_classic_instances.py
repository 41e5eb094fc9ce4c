"""Instances in the classic API: start, several instances, connect, shutdown (rows CL01 to CL09)."""

from __future__ import annotations

import gc
import re
import textwrap
import time
from functools import partial
from typing import Any

import pytest
from dask_processes import ExternalCluster, fetch, is_listening, poll_for
from distributed import Client
from ports import free_port
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import daskserve as serve
from daskserve.cluster.dask.cluster import topic_of
from daskserve.cluster.scheduler.topics import SWEEP_S


class AddHeader:
    """An ASGI middleware that adds one header to every response."""

    def __init__(self, app: ASGIApp, *, value: str) -> None:
        self.app = app
        self.value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-added", self.value.encode())]
            await send(message)

        await self.app(scope, receive, send_more)


def proxies_of(client: serve.Client) -> int:
    return sum(actor.kind == "proxy" for actor in client.status().actors)


def serve_text(client: serve.Client, text: str, route: str | None = "/text") -> None:
    client.create_backend("text", lambda request: text)
    client.create_endpoint("text", backend="text", route=route)


def test_start_returns_a_client_whose_proxy_answers(client: serve.Client, url: str) -> None:
    """CL01: it returns a Client; GET ``/-/routes`` gives 200 ``{}``."""
    assert isinstance(client, serve.Client)
    reply = fetch(f"{url}/-/routes")
    assert (reply.status, reply.json) == (200, {})


def test_the_old_port_and_host_arguments_work_and_warn(external: ExternalCluster) -> None:
    """CL02: each old argument works and warns."""
    port = free_port()
    with pytest.warns(DeprecationWarning, match="http_port"):
        client = serve.start(http_port=port, dask_client=external.client)
    with client:
        assert client.http_urls() == [f"http://127.0.0.1:{port}"]
    with pytest.warns(DeprecationWarning, match="http_host"):
        client = serve.start(http_host=None, dask_client=external.client)
    with client:
        assert client.http_urls() == []


def test_the_old_middlewares_argument_works_and_warns(external: ExternalCluster) -> None:
    """CL02, CL06: ``http_middlewares`` is deprecated and still works."""
    with pytest.warns(DeprecationWarning, match="http_middlewares"):
        client = serve.start(
            http_port=0,
            http_middlewares=[Middleware(AddHeader, value="old")],
            dask_client=external.client,
        )
    with client:
        assert fetch(f"{client.http_urls()[0]}/-/routes").headers["x-added"] == "old"


def test_a_second_detached_instance_is_refused(external: ExternalCluster) -> None:
    """CL03: the second ``start(detached=True)`` raises and names the remedy; the first instance stays."""
    with serve.start(detached=True, http_options={"port": 0}, dask_client=external.client) as first:
        serve_text(first, "first")
        with pytest.raises(
            serve.errors.ServeError, match=r"detached instance is already running.*serve\.connect\(\)"
        ):
            serve.start(detached=True, http_options={"port": 0}, dask_client=external.client)
        assert fetch(f"{first.http_urls()[0]}/text").text == "first"
        # An instance of another name runs beside it, and is found by its name.
        other = serve.start(detached=True, name="blue", http_options={"port": 0}, dask_client=external.client)
        assert serve.connect(dask_client=external.client).instance_name == first.instance_name
        blue = serve.connect(name="blue", dask_client=external.client)
        assert blue.http_urls() == other.http_urls()
        other.shutdown()


def test_two_instances_run_side_by_side(external: ExternalCluster) -> None:
    """CL04: two clients on two ports serve different backends; shutting one down closes only its port."""
    one = serve.start(http_options={"port": 0}, dask_client=external.client)
    two = serve.start(http_options={"port": 0}, dask_client=external.client)
    with two:
        for client in (one, two):
            assert re.fullmatch("daskserve-[A-Za-z]{6}", client.instance_name)
        serve_text(one, "one")
        serve_text(two, "two")
        (url_one,), (url_two,) = one.http_urls(), two.http_urls()
        assert (fetch(f"{url_one}/text").text, fetch(f"{url_two}/text").text) == ("one", "two")
        del one, client
        gc.collect()
        poll_for(lambda: not is_listening(url_one), 5)
        assert fetch(f"{url_two}/text").text == "two"


def test_detached_and_other_instances_coexist(external: ExternalCluster, client: serve.Client) -> None:
    """CL04: other instances may run beside the detached one, with the same backend names."""
    with serve.start(detached=True, http_options={"port": 0}, dask_client=external.client) as detached:
        serve_text(client, "mine")
        serve_text(detached, "ours")
        assert fetch(f"{detached.http_urls()[0]}/text").text == "ours"
    assert fetch(f"{client.http_urls()[0]}/text").text == "mine"


def test_an_instance_without_a_proxy_has_no_listener(external: ExternalCluster) -> None:
    """CL06: with NoServer there is no listener, and handles work."""
    with serve.start(http_options={"location": "NoServer"}, dask_client=external.client) as client:
        assert client.http_urls() == []
        assert [each for each in external.leftovers() if "listens" in each] == []
        serve_text(client, "by handle", route=None)
        assert client.get_handle("text").remote().result() == "by handle"


def test_every_node_has_one_proxy_on_one_host(external: ExternalCluster) -> None:
    """CL06: EveryNode gives one proxy per host, and both workers run on one host."""
    options = {"port": 0, "location": "EveryNode"}
    with serve.start(http_options=options, dask_client=external.client) as client:
        serve_text(client, "text")
        (url,) = client.http_urls()
        assert fetch(f"{url}/text").text == "text"
        assert proxies_of(client) == 1


def test_every_worker_shares_one_port(external: ExternalCluster) -> None:
    """CL06, CL14: every worker has a proxy on the same port; all proxies know a new route at once."""
    options = {"port": 0, "location": "EveryWorker"}
    with serve.start(http_options=options, dask_client=external.client) as client:
        assert proxies_of(client) == 2
        (url,) = client.http_urls()
        for number in range(5):
            client.create_backend(f"b{number}", lambda request: "here")
            client.create_endpoint(f"e{number}", backend=f"b{number}", route=f"/e{number}")
            # The kernel assigns each connection to one of the proxies.
            assert {fetch(f"{url}/e{number}").status for _ in range(8)} == {200}


def test_connect_without_a_detached_instance(external: ExternalCluster) -> None:
    """CL07: it finds the only instance of a program; without any, the error says to start a detached one."""
    with pytest.raises(serve.errors.ServeError, match=r"serve\.start\(detached=True\)"):
        serve.connect(dask_client=external.client)
    options: dict[str, Any] = {"dask_client": external.client, "http_options": {"port": 0}}
    with serve.start(name="first", **options) as first:
        with serve.connect(dask_client=external.client) as client:
            assert client.instance_name == "first"
            assert client.list_backends() == {}
        with serve.start(name="second", **options):
            with pytest.raises(serve.errors.BadRequestError, match="first, second"):
                serve.connect(dask_client=external.client)
            with serve.connect(dask_client=external.client, name="second") as client:
                assert client.status().instance == "second"
            with pytest.raises(serve.errors.NotRunningError):
                serve.connect(dask_client=external.client, name="third")
        assert first.list_backends() == {}


def test_connect_from_another_process(external: ExternalCluster) -> None:
    """CL07: a second process sees the same endpoints."""
    source = """
        import sys
        import daskserve as serve
        client = serve.connect(address=sys.argv[1])
        print("endpoints", sorted(client.list_endpoints()))
        print("answer", client.get_handle("text").remote().result())
        """
    with serve.start(detached=True, http_options={"port": 0}, dask_client=external.client) as client:
        serve_text(client, "same")
        program = external.run_program(textwrap.dedent(source))
        assert program.wait() == 0, program.report()
        assert program.output == "endpoints ['text']\nanswer same\n"
        assert fetch(f"{client.http_urls()[0]}/text").text == "same"


def test_connect_inside_a_backend_finds_its_own_instance(client: serve.Client, url: str) -> None:
    """CL07: from a backend of an instance that is not detached."""

    class Inside:
        def __init__(self) -> None:
            self.client = serve.connect()

        def __call__(self, request: Any) -> Any:
            return [self.client.instance_name, *sorted(serve.connect().list_endpoints())]

    client.create_backend("inside", Inside)
    client.create_endpoint("inside", backend="inside", route="/inside")
    assert fetch(f"{url}/inside").json == [client.instance_name, "inside"]
    assert client.get_handle("inside").remote().result() == [client.instance_name, "inside"]


def test_shutdown_is_idempotent_and_frees_the_port(external: ExternalCluster) -> None:
    """CL09: later calls raise, and a new start on the same port works at once."""
    port = free_port()
    client = serve.start(http_options={"port": port}, dask_client=external.client)
    serve_text(client, "text")
    handle = client.get_handle("text")
    client.shutdown()
    assert not is_listening(f"http://127.0.0.1:{port}")
    client.shutdown()
    for call in (
        client.list_backends,
        client.list_endpoints,
        client.http_urls,
        lambda: client.create_backend("a", lambda request: "a"),
        lambda: client.get_handle("text"),
    ):
        with pytest.raises(serve.errors.ServeError, match=r"Client has already been shut down\."):
            call()
    assert client.status() == serve.Status()
    with pytest.raises(serve.errors.ServeError, match="has been shut down"):
        handle.remote().result(5)
    with serve.start(http_options={"port": port}, dask_client=external.client) as again:
        serve_text(again, "again")
        assert fetch(f"http://127.0.0.1:{port}/text").text == "again"


def listeners_of(instance: str, dask_scheduler: Any) -> int:
    return len(dask_scheduler._broker._topics[topic_of(instance)].subscribers)


def test_an_instance_restarted_at_once_keeps_its_topic(external: ExternalCluster) -> None:
    """CL09: the cleanup of the first instance does not remove the topic of the second of the same name."""
    serve.start(detached=True, http_options={"port": 0}, dask_client=external.client).shutdown()
    with serve.start(detached=True, http_options={"port": 0}, dask_client=external.client) as client:
        until = time.monotonic() + 1.3 * SWEEP_S
        serve_text(client, "again")
        assert client.get_handle("text").remote().result(5) == "again"
        known = external.client.run_on_scheduler(partial(listeners_of, client.instance_name))
        assert known > 1
        while time.monotonic() < until:
            assert external.client.run_on_scheduler(partial(listeners_of, client.instance_name)) == known


def topics_on(dask_scheduler: Any) -> dict[str, set[str]]:
    """Return the listeners of each topic of daskserve."""
    return {
        name: topic.subscribers
        for name, topic in dask_scheduler._broker._topics.items()
        if name.startswith(topic_of(""))
    }


def test_a_program_that_unsubscribes_after_the_end_leaves_no_topic(external: ExternalCluster) -> None:
    """CL09: the cleanup waits for the last listener, whose unsubscription would create the topic again."""
    with (
        Client(external.address, set_as_default=False) as late,
        serve.start(http_options={"port": 0}, dask_client=external.client) as client,
    ):
        topic = topic_of(client.instance_name)
        late.subscribe_topic(topic, lambda event: None)
        poll_for(lambda: late.id in late.run_on_scheduler(topics_on)[topic])
        client.shutdown()
        poll_for(lambda: late.run_on_scheduler(topics_on) == {topic: {late.id}})
        late.unsubscribe_topic(topic)
        poll_for(lambda: not late.run_on_scheduler(topics_on))


def test_a_connected_program_unsubscribes_when_the_instance_ends(external: ExternalCluster) -> None:
    """CL09: a program that stays connected to Dask keeps no topic on the scheduler."""
    with Client(external.address, set_as_default=False) as other:
        client = serve.start(detached=True, http_options={"port": 0}, dask_client=external.client)
        serve_text(client, "text")
        assert serve.connect(dask_client=other).get_handle("text").remote().result(5) == "text"
        assert other.id in other.run_on_scheduler(topics_on)[topic_of(client.instance_name)]
        client.shutdown()
        poll_for(lambda: not other.run_on_scheduler(topics_on))


def test_a_client_reports_a_shutdown_by_another_client(external: ExternalCluster) -> None:
    """CL09: the first client of a detached instance reports that another client has ended it."""
    first = serve.start(detached=True, http_options={"port": 0}, dask_client=external.client)
    serve.connect(dask_client=external.client).shutdown()
    with pytest.raises(serve.errors.ServeError, match="has been shut down"):
        first.list_backends()
    first.shutdown()
    with pytest.raises(serve.errors.ServeError, match="already been shut down"):
        first.list_backends()
