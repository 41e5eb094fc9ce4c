"""The undocumented parts of distributed that daskserve uses behave as expected."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import dask.config
import pytest
from distributed import Client, LocalCluster, Scheduler, default_client, get_worker
from distributed.broker import Broker
from distributed.comm import listen
from distributed.comm.core import Comm
from distributed.core import Status
from tornado.ioloop import IOLoop

from daskserve.cluster.dask.quiet_close import QuietCluster
from daskserve.cluster.distributed_internals import (
    agree,
    answer_signal,
    as_current,
    call_before_close,
    call_when_closed,
    close_client,
    config_variables,
    configured_security,
    connect_again_when,
    connect_comm,
    detach_socket,
    is_plain_tcp,
    peer_handshake,
    publish,
    release_loop,
    socket_of,
    stop_answering_signal,
    stream_of,
)

pytestmark = pytest.mark.smoke

SECURITY_LOADER = "distributed.client.security-loader"


def test_a_new_process_reads_the_configuration_from_its_variables() -> None:
    sections: dict[str, Any] = {"daskserve": {"a": [1, 2]}, "distributed": {"b": None}}
    assert sections.items() <= dask.config.collect_env(config_variables(sections)).items()


def load_security(info: dict[str, Any]) -> str:
    return f"security of {info['address']}"


def test_the_security_of_an_address_comes_from_dasks_configuration() -> None:
    assert configured_security("tcp://a:1").get_connection_args("client").get("require_encryption") is False
    with dask.config.set({SECURITY_LOADER: f"{__name__}.load_security"}):
        assert configured_security("tls://a:1") == "security of tls://a:1"  # type: ignore[comparison-overlap]


def test_a_worker_and_a_client_are_current_within_a_context_only() -> None:
    worker, client = Mock(), Mock()
    with as_current(worker, client):
        assert (get_worker(), default_client()) == (worker, client)
    with pytest.raises(ValueError, match="No worker found"):
        get_worker()
    with pytest.raises(ValueError, match="No clients found"):
        default_client()


async def test_a_clients_listening_task_ends_with_the_client() -> None:
    closed = asyncio.Event()
    for listening in (asyncio.ensure_future(asyncio.sleep(0)), None):
        closed.clear()
        client: Any = Mock(loop=IOLoop.current(), _handle_report_task=listening)
        call_when_closed(client, closed.set)
        assert not closed.is_set()
        async with asyncio.timeout(5):
            await closed.wait()


async def _connected_pair(scheme: str, **options: Any) -> tuple[Comm, Comm]:
    accepted: asyncio.Queue[Comm] = asyncio.Queue()
    listener = await listen(f"{scheme}://127.0.0.1:0" if scheme == "tcp" else "inproc://", accepted.put)
    try:
        near = await connect_comm(listener.contact_address, **options)
        return near, await accepted.get()
    finally:
        listener.stop()


async def test_a_connection_presents_the_given_handshake() -> None:
    near, far = await _connected_pair("tcp", handshake={"python": (3, 99, 0), "pickle-protocol": 4})
    assert peer_handshake(far)["python"] == (3, 99, 0)
    assert far.handshake_options["pickle-protocol"] == near.handshake_options["pickle-protocol"] == 4
    assert set(peer_handshake(near)) == {"compression", "python", "pickle-protocol"}
    agree(near, {**peer_handshake(near), "pickle-protocol": 3})
    assert near.handshake_options["pickle-protocol"] == 3
    await near.write({"hello": "world"})
    assert await far.read() == {"hello": "world"}
    near.abort()
    far.abort()


async def test_a_refused_connection_fails_immediately() -> None:
    near, far = await _connected_pair("tcp")
    address = near.peer_address
    near.abort()
    far.abort()
    with pytest.raises(OSError, match=r"refused"):
        await connect_comm(address)


async def test_the_socket_of_a_plain_connection_outlives_it() -> None:
    near, far = await _connected_pair("tcp")
    assert is_plain_tcp(near)
    assert stream_of(near) is not None
    assert socket_of(near) is not None
    with detach_socket(near) as mine, detach_socket(far) as theirs:
        assert near.closed()
        assert (stream_of(near), socket_of(near)) == (None, None)
        mine.sendall(b"still open")
        theirs.setblocking(True)
        assert theirs.recv(100) == b"still open"


async def test_a_connection_within_the_process_has_no_socket() -> None:
    near, far = await _connected_pair("inproc")
    assert not is_plain_tcp(near)
    assert (stream_of(near), socket_of(near)) == (None, None)
    near.abort()
    far.abort()


def test_a_message_goes_to_open_connections_and_closed_ones_stay_subscribed() -> None:
    sent: list[str] = []
    scheduler: Any = Mock(plugins={})
    scheduler.client_comms = {
        name: Mock(closed=lambda name=name: name == "closed") for name in ("open", "closed")
    }
    scheduler.send_all = lambda client_msgs, worker_msgs: sent.extend(client_msgs)
    scheduler._broker = broker = Broker(10, scheduler)
    scheduler.log_event = broker.publish
    for name in ("open", "closed"):
        broker.subscribe("topic", name)
    publish(scheduler, "topic", {"kind": "news"})
    assert sent == ["open"]
    assert broker._topics["topic"].subscribers == {"open", "closed"}


def test_a_function_is_called_before_a_client_closes() -> None:
    states: list[str] = []

    async def scenario() -> None:
        async with LocalCluster(
            n_workers=0, processes=False, asynchronous=True, dashboard_address=":0"
        ) as cluster:
            client = await Client(cluster, asynchronous=True, set_as_default=False)

            async def note() -> None:
                states.append(client.status)
                assert await client.run_on_scheduler(lambda: 1) == 1  # still connected

            call_before_close(client, note)
            await client.close()

    asyncio.run(scenario())
    assert states == ["closing"]


async def test_a_scheduler_that_a_signal_ends_leaves_before_it_closes() -> None:
    class ClosingScheduler:
        status = Status.running

        def __init__(self) -> None:
            self.events: list[str] = []

        async def close(self, timeout: float | None, reason: str) -> None:
            self.events.append(reason)

    scheduler: Any = ClosingScheduler()
    answer_signal(scheduler, lambda: scheduler.events.append("left"))
    await scheduler.close(reason="scheduler-close")
    await scheduler.close(reason="signal-15")
    assert scheduler.events == ["scheduler-close", "left", "signal-15"]
    stop_answering_signal(scheduler)
    assert "close" not in vars(scheduler)


async def test_a_client_connects_again_only_when_its_scheduler_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ConnectingClient:
        status = "connecting"

        def __init__(self) -> None:
            self._scheduler_identity: dict[str, Any] = {}
            self.events: list[str] = []

        async def _ensure_connected(self, timeout: float | None) -> None:
            self.events.append("connected")
            self._scheduler_identity = {"id": "s"}
            self.status = "running"

    client: Any = ConnectingClient()

    async def is_back() -> None:
        client.events.append("back")

    connect_again_when(client, is_back, lambda: client.events.append("resumed"))
    await client._ensure_connected(timeout=1)
    assert client.events == ["connected"]
    await client._ensure_connected(timeout=1)
    assert client.events[1:] == ["back", "connected", "resumed"]
    reconnect = client._reconnect  # Dask's, without the decorator that logs errors
    with pytest.raises(AttributeError, match="scheduler_comm"):
        await reconnect()
    assert not caplog.records


def test_the_last_client_on_a_loop_of_dask_ends_its_thread() -> None:
    """Whether it is closed on this thread, on the loop, or with its scheduler."""

    async def use_another(address: str) -> None:
        await close_client(await Client(address, asynchronous=True, set_as_default=False))

    for ends_scheduler in (False, True):
        cluster = QuietCluster(
            workers={},
            scheduler={
                "cls": Scheduler,
                "options": {"port": 0, "dashboard": False, "dashboard_address": ":0"},
            },
            silence_logs=False,
        )
        loop = cluster.loop
        client = Client(cluster, set_as_default=False)

        client.sync(use_another, cluster.scheduler_address)
        if ends_scheduler:
            client.shutdown()
            release_loop(client)
        else:
            client.close()
        cluster.close()
        assert loop.asyncio_loop.is_closed()  # type: ignore[union-attr]
