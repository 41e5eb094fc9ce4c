"""The undocumented parts of distributed that daskserve uses behave as expected."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import dask.config
import pytest
from distributed import Client, LocalCluster, get_worker
from distributed.broker import Broker
from distributed.comm import listen
from distributed.comm.core import Comm

from daskserve.cluster.distributed_internals import (
    agree,
    as_current_worker,
    call_before_close,
    call_when_closed,
    config_variables,
    configured_security,
    connect_comm,
    detach_socket,
    is_plain_tcp,
    peer_handshake,
    publish,
    replace_method,
    restore_method,
    socket_of,
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


def test_a_worker_is_current_within_a_context_only() -> None:
    worker = Mock()
    with as_current_worker(worker):
        assert get_worker() is worker
    with pytest.raises(ValueError, match="No worker found"):
        get_worker()


def test_a_replaced_method_answers_local_and_remote_calls_until_it_is_restored() -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.handlers = {"a": self.a, "b": self.b}

        def a(self) -> str:
            return "a"

        def b(self) -> str:
            return "b"

    scheduler: Any = Scheduler()
    originals = {
        "a": replace_method(scheduler, "a", lambda: "new a"),
        "b": replace_method(scheduler, "b", lambda: "new b", handler=lambda: "remote b"),
    }
    assert {name: original() for name, original in originals.items()} == {"a": "a", "b": "b"}
    assert (scheduler.a(), scheduler.handlers["a"]()) == ("new a", "new a")
    assert (scheduler.b(), scheduler.handlers["b"]()) == ("new b", "remote b")
    for name, original in originals.items():
        restore_method(scheduler, name, original)
    assert (scheduler.a(), scheduler.handlers["a"]()) == ("a", "a")
    assert (scheduler.b(), scheduler.handlers["b"]()) == ("b", "b")


def test_a_clients_listening_task_ends_with_the_client() -> None:
    async def main() -> None:
        closed = asyncio.Event()
        client: Any = Mock(_handle_report_task=asyncio.ensure_future(asyncio.sleep(0)))
        call_when_closed(client, closed.set)
        assert not closed.is_set()
        async with asyncio.timeout(5):
            await closed.wait()

    asyncio.run(main())


async def _connected_pair(scheme: str, **options: Any) -> tuple[Comm, Comm]:
    accepted: asyncio.Queue[Comm] = asyncio.Queue()
    listener = await listen(f"{scheme}://127.0.0.1:0" if scheme == "tcp" else "inproc://", accepted.put)
    try:
        near = await connect_comm(listener.contact_address, **options)
        return near, await accepted.get()
    finally:
        listener.stop()


def test_a_connection_presents_the_given_handshake() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_refused_connection_fails_immediately() -> None:
    async def main() -> None:
        near, far = await _connected_pair("tcp")
        address = near.peer_address
        near.abort()
        far.abort()
        with pytest.raises(OSError, match=r"refused"):
            await connect_comm(address)

    asyncio.run(main())


def test_the_socket_of_a_plain_connection_outlives_it() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_connection_within_the_process_has_no_socket() -> None:
    async def main() -> None:
        near, far = await _connected_pair("inproc")
        assert not is_plain_tcp(near)
        assert (stream_of(near), socket_of(near)) == (None, None)
        near.abort()
        far.abort()

    asyncio.run(main())


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
