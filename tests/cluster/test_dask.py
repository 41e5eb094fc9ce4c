"""A process's view of an instance when the scheduler is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import control_harness
import pytest

from daskserve.client.instance.calls import ControllerCalls
from daskserve.cluster.dask import cluster as dask
from daskserve.cluster.dask.cluster import RECONNECT_S, DaskCluster, RemoteStore
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.dask.subscription import TopicSubscription
from daskserve.cluster.protocols.base import StoreChange
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress
from daskserve.errors import NotRunningError, UnavailableError
from daskserve.payload.parcels import Parcel

pytestmark = pytest.mark.virtual_time


class Client:
    """A Dask client whose topics have no scheduler but this one."""

    def __init__(self) -> None:
        self.status = "running"
        self.subscribed: list[str] = []
        self.handlers: dict[str, Any] = {}

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        self.subscribed.append(topic)
        self.handlers[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        del self.handlers[topic]

    async def log_event(self, topic: str, message: Any) -> None:
        await asyncio.sleep(0)
        if topic in self.handlers:
            self.handlers[topic]((0.0, message))


def view(client: Any) -> DaskCluster:
    channels: Any = SimpleNamespace(watchers=[])
    connection: Any = None
    return DaskCluster("a", client, channels, clock=LoopClock(), connection=connection)


def verbs_of_a_controller(client: Any) -> list[Callable[[], Awaitable[Any]]]:
    """Return the calls to the scheduler whose errors a controller passes on to its callers."""
    store, cluster = RemoteStore(client, "a"), view(client)
    return [
        partial(store.commit, 1, StoreChange()),
        partial(store.rewrite, 1, StoreChange()),
        store.load,
        partial(store.take_over, 1, is_complete=True, own=[]),
        cluster.workers,
        cluster.refused_workers,
        partial(cluster.inspect, "tcp://a:1", by_scheduler=True),
        partial(cluster.restart_worker, 1, "tcp://a:1"),
        partial(cluster.send_parcel, Parcel("d", (2,)), [b"ab"]),
    ]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def ask(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(dask, "ask_supervisor", ask)
    monkeypatch.setattr(dask, "ask_if_supervised", ask)


async def test_an_instance_that_a_new_scheduler_does_not_know_yet_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_with(monkeypatch, NotRunningError("no instance"))
    cluster = view(Client())
    with pytest.raises(NotRunningError):
        await cluster.controller()
    await cluster.resume()
    with pytest.raises(UnavailableError, match="'a' is reconnecting: its scheduler was replaced"):
        await cluster.controller()
    await asyncio.sleep(RECONNECT_S + 1)
    with pytest.raises(NotRunningError):
        await cluster.controller()


async def test_a_controller_whose_scheduler_does_not_know_the_instance_yet_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The previous controller may get a change; the caller then retries it with the next controller."""
    fail_with(monkeypatch, NotRunningError("no instance"))
    for verb in verbs_of_a_controller(Client()):
        with pytest.raises(UnavailableError, match="no instance"):
            await verb()


async def test_a_call_during_which_the_scheduler_is_lost_is_retried_unless_the_client_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_with(monkeypatch, OSError("connection reset"))
    client = Client()
    for verb in (view(client).controller, *verbs_of_a_controller(client)):
        client.status = "connecting"
        with pytest.raises(UnavailableError, match="connection reset"):
            await verb()
        client.status = "closed"
        with pytest.raises(OSError, match="connection reset"):
            await verb()


async def test_a_process_has_one_view_of_an_instance_until_that_ends() -> None:
    closed = []
    channels, loop = SimpleNamespace(watchers=[]), asyncio.get_running_loop()
    connection: Any = SimpleNamespace(_clusters={}, client=Client(), channels=channels, loop=loop)
    connection.clock, connection.worker, connection._registry = LoopClock(), None, None
    connection.spawn = lambda closing: closed.append(asyncio.ensure_future(closing))
    first = DaskConnection.cluster(connection, "a")
    assert DaskConnection.cluster(connection, "a") is first
    first._mark_ended()
    again = DaskConnection.cluster(connection, "a")
    assert again is not first
    assert DaskConnection.cluster(connection, "a") is again
    await asyncio.sleep(0)
    await asyncio.gather(*closed)
    assert (len(closed), again.is_ended) == (1, False)


async def test_a_process_that_listens_subscribes_again_at_the_next_scheduler() -> None:
    client: Any = Client()
    topic = TopicSubscription(client, "daskserve/a", LoopClock())
    await topic.resume()
    assert client.subscribed == []
    heard: list[Any] = []
    await topic.subscribe(heard.append)
    await topic.resume()
    assert client.subscribed == ["daskserve/a", "daskserve/a"]
    await client.log_event("daskserve/a", {"kind": "update"})
    assert heard == [{"kind": "update"}]


async def test_a_subscription_that_is_cancelled_leaves_nothing_at_the_scheduler() -> None:
    client: Any = Client()
    topic = TopicSubscription(client, "daskserve/a", LoopClock())
    subscribing = asyncio.ensure_future(topic.subscribe(print))
    await asyncio.sleep(0)
    subscribing.cancel()
    await asyncio.wait({subscribing})
    await asyncio.sleep(1)
    assert client.handlers == {}


async def test_each_attempt_of_a_change_sends_the_parcels_that_the_scheduler_lacks() -> None:
    """The scheduler is lost while it gets a parcel, and its successor lacks it, too."""
    sent: list[str] = []
    verbs: list[str] = []

    class Cluster:
        resumed_at = None

        async def controller(self) -> ActorAddress:
            return ActorAddress("controller", "w", 1)

        def forget_controller(self) -> None:
            """Nothing is known here."""

        async def send_parcel(self, parcel: Parcel, parts: Any) -> None:
            sent.append(parcel.digest)
            if len(sent) == 1:
                raise UnavailableError("the scheduler was lost")

        async def call(self, address: ActorAddress, verb: str, **message: Any) -> str:
            verbs.append(verb)
            if len(verbs) == 1:
                raise UnavailableError("the scheduler was lost again")
            return "done"

    parcel, connection = Parcel("d", (2,)), SimpleNamespace(cluster=lambda _: cluster, clock=LoopClock())
    cluster, spec = Cluster(), control_harness.spec("b", code=parcel.label(), parts=(b"ab",))
    calls = ControllerCalls(connection, "a")  # type: ignore[arg-type]
    assert await calls.call("deploy", spec=spec) == "done"
    assert (sent, verbs) == (["d"] * 3, ["deploy"] * 2)
