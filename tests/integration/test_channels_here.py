"""Memory and leftovers of channels; the scheduler, the worker and programs are in this process."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import numpy as np
import pytest
from dask_processes import ExternalCluster, poll_for
from distributed import Client, Scheduler, Security, SpecCluster, Worker
from distributed.comm import connect

import daskserve as serve
from daskserve._version import PROTOCOL, __version__
from daskserve.cluster.channel.connect.dialling import CHANNEL_OP, READY, SPLICE_OP
from daskserve.cluster.channel.wire import sharing
from daskserve.cluster.channel.wire.frames import OPEN, FramePacker
from daskserve.cluster.channel.wire.transport import HEAD, MAGIC, SIZE
from daskserve.cluster.dask.connection import connection_of
from daskserve.cluster.scheduler.supervisor import PLUGIN_NAME
from daskserve.common.types import ActorAddress
from daskserve.payload import pickling

MIB = 1 << 20
ARRAY_BYTES = 16 * MIB
#: Memory for buffers, messages and tasks.
REST_BYTES = 6 * MIB


class Echo:
    def __call__(self, array: Any) -> Any:
        return array


@contextmanager
def cluster_here(worker_protocol: str = "tcp", **security: Any) -> Iterator[tuple[SpecCluster, serve.Client]]:
    """Yield a cluster with real sockets in this process, and an instance on it."""
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", **security}
    cluster = SpecCluster(
        workers={0: {"cls": Worker, "options": {**options, "nthreads": 1, "protocol": worker_protocol}}},
        scheduler={"cls": Scheduler, "options": {**options, "port": 0, "protocol": "tcp"}},
        **security,
    )
    with cluster, Client(cluster, set_as_default=False) as dask_client:
        with serve.start(dask_client=dask_client, http_options={"location": "NoServer"}) as client:
            yield cluster, client


@pytest.mark.parametrize("route", ["direct", "scheduler"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_an_array_is_stored_only_once_where_it_arrives(
    route: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "HAS_SEGMENTS", is_shared)
    if not is_shared:
        monkeypatch.setattr(pickling, "copy_of", lambda data: memoryview(bytes(data)))
    array = np.arange(ARRAY_BYTES // 8)
    with dask.config.set({"daskserve.channel.route": route}), cluster_here() as (_, client):
        client.deploy("echo", Echo)
        handle = client.get_handle("echo")
        handle.remote(np.zeros(1)).result(20)
        tracemalloc.start()
        try:
            answer = handle.remote(array).result(20)
            kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (answer == array).all()
    # Without shared memory, there are three copies: that of the call, that in the replica, and the answer.
    copies = 0 if is_shared else 3
    assert copies * ARRAY_BYTES <= peak_bytes < copies * ARRAY_BYTES + REST_BYTES
    assert kept_bytes < copies / 2 * ARRAY_BYTES + REST_BYTES


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_connections_end_with_their_dask_client_even_if_its_loop_runs_on(route: str) -> None:
    with cluster_here() as (cluster, client):

        def connections() -> list[str]:
            servers = (cluster.scheduler, *cluster.workers.values())
            return sorted(str(op) for each in servers for op in each._comms.values())

        client.status()
        before = connections()
        assert "daskserve_channel" in before
        with dask.config.set({"daskserve.channel.route": route}):
            with Client(cluster, set_as_default=False) as other:
                connection = connection_of(other)
                view = connection.cluster(client.instance_name)
                connection.sync(view.call(connection.sync(view.controller()), "ping"))
                assert connections().count("daskserve_channel") == before.count("daskserve_channel") + 1
        ours = [each for each in before if "daskserve" in each]
        poll_for(lambda: [each for each in connections() if "daskserve" in each] == ours, 5, what=connections)


def test_a_splice_connects_a_stream_of_bytes_with_one_of_messages() -> None:
    """The scheduler forwards the handshake too."""
    with dask.config.set({"daskserve.channel.route": "scheduler"}), cluster_here("ws") as (_, client):
        client.deploy("echo", Echo)
        array = np.arange(MIB)
        assert (client.get_handle("echo").remote(array).result(20) == array).all()


def test_a_splice_connects_an_encrypted_and_a_plain_connection() -> None:
    """The worker's encrypted socket cannot be taken over, so the caller's socket is not taken over either."""
    security = Security.temporary()
    security.require_encryption = False
    with dask.config.set({"daskserve.channel.route": "scheduler"}):
        with cluster_here("tls", security=security) as (_, client):
            client.deploy("echo", Echo)
            array = np.arange(MIB)
            assert (client.get_handle("echo").remote(array).result(20) == array).all()


async def ping_as_a_stranger(address: str, message: dict[str, Any], actor: ActorAddress) -> None:
    """Request a channel without the secret, and ping an actor over it; return when it is closed."""
    async with asyncio.timeout(10):
        comm = await connect(address)
        await comm.write(message)
        answer = await comm.read()
        assert answer == READY or "error" not in answer
        head = {"verb": "ping", "message": {}}
        ping = (OPEN, 0, actor.name, actor.incarnation, "control", head, None, False, None, None)
        body, _ = FramePacker().pack([ping])
        await comm.stream.write(HEAD.pack(MAGIC, 1) + SIZE.pack(len(body)) + body)
        with pytest.raises(OSError):
            await comm.stream.read_bytes(1)
        comm.abort()


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_a_stranger_who_reaches_a_port_gets_no_channel(route: str) -> None:
    with cluster_here() as (cluster, client):
        connection = connection_of(client._connection.cluster_connection.client)
        actor = connection.sync(connection.cluster(client.instance_name).controller())
        address, message = actor.worker, {"op": CHANNEL_OP, "by_socket": True}
        if route == "scheduler":
            address = cluster.scheduler.address
            ours = {"version": __version__, "protocol": PROTOCOL}
            message = {"op": SPLICE_OP, "worker": actor.worker, "by_socket": True, **ours}
        asyncio.run(ping_as_a_stranger(address, message, actor))


def test_the_secret_stands_in_no_log_and_no_status(caplog: pytest.LogCaptureFixture) -> None:
    """Not even in Dask's logs of all messages."""
    caplog.set_level(logging.DEBUG, "daskserve")
    caplog.set_level(logging.DEBUG, "distributed")
    dask_logger = logging.getLogger("distributed")  # does not propagate
    dask_logger.addHandler(caplog.handler)
    try:
        with cluster_here() as (cluster, client):
            client.deploy("echo", Echo)
            client.get_handle("echo").remote(1).result(20)
            supervisor = cluster.scheduler.plugins[PLUGIN_NAME]
            value = asyncio.run(supervisor._hosts.secret.reveal())
            shown = f"{client.status()!r} {client.status()} {cluster.scheduler._broker._topics}"
    finally:
        dask_logger.removeHandler(caplog.handler)
    assert "channel_secret" in caplog.text, "the request for it is logged"
    for text in (caplog.text, shown):
        assert value.hex() not in text
        assert repr(value)[2:-1] not in text


def refused(dask_worker: Any) -> list[float]:
    """Return how many connections a worker has refused, by cause; runs in the worker."""
    links = [each.connection for each in dask_worker.state.actors.values() if type(each).__name__ == "Host"]
    samples = [sample for connection in links for sample in connection.channels.samples()]
    return [value for name, _, value in samples if name == "channel_refusals"]


def test_the_next_instance_of_a_program_knows_its_program(external: ExternalCluster) -> None:
    """The program has connected to the workers before, with the secret of that time."""
    for number in range(3):
        with serve.start(dask_client=external.client, http_options={"location": "NoServer"}) as client:
            client.create_backend("echo", "served.echo", config={"num_replicas": 2})
            client.create_endpoint("echo", backend="echo")
            handle = client.get_handle("echo")
            answers = [handle.remote(text=str(number)) for _ in range(8)]
            assert {each.result(10) for each in answers} == {str(number)}
            assert [counts and sum(counts) for counts in external.client.run(refused).values()] == [0, 0]
