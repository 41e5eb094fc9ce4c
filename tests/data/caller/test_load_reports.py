"""Load reports of routers to the controller."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
from by_task import by_task
from scripted_routes import ScriptedListener, ScriptedRoutes

from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind, Load, Message
from daskserve.data.caller.routing.load_reports import (
    GATHER_S,
    PERIOD_S,
    STARVING_PERIOD_S,
    BackendQueue,
    LoadReports,
)
from daskserve.data.caller.routing.router import Routers
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.errors import NotRunningError, ReplicaBusyError, UnavailableError


@dataclass
class Queue(BackendQueue):
    """One backend's queue, which the test controls."""

    waiting: int = 0
    in_flight: int = 0
    is_autoscaled: bool = True
    has_replicas: bool = True
    versions: None = None

    @property
    def is_starving(self) -> bool:
        return bool(self.waiting) and not self.has_replicas


class Controller:
    """The controller as reporters see it, with the methods of a cluster that they use."""

    instance = "i"
    is_ended = False

    def is_local(self, address: ActorAddress) -> bool:
        return False

    def handler_of(self, address: ActorAddress) -> Any:
        """Return None, because no request reaches a replica."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, dict[str, Any]]] = []
        self.errors: list[Exception] = []
        self.forgotten = 0

    async def controller(self) -> str:
        return "controller"

    def forget_controller(self) -> None:
        self.forgotten += 1

    async def call(self, address: str, verb: str, *, router: str, loads: dict[str, Any]) -> None:
        assert (address, verb) == ("controller", "report_load")
        if self.errors:
            raise self.errors.pop()
        self.reports.append((asyncio.get_running_loop().time(), loads))


def make(**queues: Queue) -> tuple[Controller, LoadReports]:
    controller = Controller()
    return controller, LoadReports(cast(Cluster, controller), LoopClock(), queues)


@pytest.mark.virtual_time
async def test_load_is_reported_every_second_and_its_end_once() -> None:
    queue = Queue(waiting=1, in_flight=2)
    controller, reports = make(b=queue, idle=Queue(), other=Queue(waiting=5, is_autoscaled=False))
    reports.report_soon(is_urgent=False)
    await asyncio.sleep(2.5 * PERIOD_S)
    assert controller.reports == [(n * PERIOD_S, {"b": [1, 2]}) for n in range(3)]
    queue.waiting = queue.in_flight = 0
    await asyncio.sleep(20 * PERIOD_S)
    assert controller.reports[3:] == [(3 * PERIOD_S, {})]
    reports.close()


@pytest.mark.virtual_time
async def test_the_items_of_maps_count_as_waiting() -> None:
    controller, left = Controller(), {"b": 1000}
    queues = {"b": Queue(waiting=1, in_flight=8)}
    reports = LoadReports(cast(Cluster, controller), LoopClock(), queues, backlogs=lambda: left)
    reports.report_soon(is_urgent=False)
    await asyncio.sleep(PERIOD_S / 2)
    assert controller.reports == [(0.0, {"b": [1001, 8]})]
    reports.close()


@pytest.mark.virtual_time
async def test_nothing_is_reported_if_no_backend_is_autoscaled() -> None:
    queue = Queue(waiting=1, is_autoscaled=False)
    controller, reports = make(b=queue)
    reports.report_soon(is_urgent=True)
    await asyncio.sleep(5 * PERIOD_S)
    assert controller.reports == []
    assert len(asyncio.all_tasks()) == 1
    queue.is_autoscaled = True
    reports.report_soon(is_urgent=False)
    await asyncio.sleep(2 * GATHER_S)
    assert len(controller.reports) == 1
    queue.is_autoscaled = False
    await asyncio.sleep(2 * PERIOD_S)
    assert len(asyncio.all_tasks()) == 1
    reports.close()


@pytest.mark.virtual_time
async def test_a_request_without_replicas_is_reported_at_once_and_more_often() -> None:
    queue = Queue()
    controller, reports = make(b=queue)
    reports.report_soon(is_urgent=False)
    await asyncio.sleep(0.5 * PERIOD_S)
    queue.waiting, queue.has_replicas = 1, False
    reports.report_soon(is_urgent=True)
    await asyncio.sleep(0.6 * STARVING_PERIOD_S)
    queue.waiting = 50
    await asyncio.sleep(0.6 * STARVING_PERIOD_S)
    first = 0.5 * PERIOD_S + GATHER_S
    assert controller.reports == [(first, {"b": [1, 0]}), (first + STARVING_PERIOD_S, {"b": [50, 0]})]
    reports.close()


@pytest.mark.virtual_time
async def test_a_failed_report_is_retried_with_the_newest_load() -> None:
    queue = Queue(waiting=1)
    controller, reports = make(b=queue)
    controller.errors = [UnavailableError("it is being replaced"), OSError("it is gone")]
    reports.report_soon(is_urgent=True)
    await asyncio.sleep(0.05)
    queue.waiting = 2
    await asyncio.sleep(0.3)
    assert [loads for _, loads in controller.reports] == [{"b": [2, 0]}]
    assert controller.forgotten == 2
    reports.close()


NOTHING = {"replicas": [], "concurrency": 1, "max_queued": 5, "max_crash_retries": 1, "autoscaled": True}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.virtual_time
async def test_requests_to_a_backend_without_replicas_are_reported_together_at_once(is_known: bool) -> None:
    controller = Controller()
    routers = Routers(
        cast(Cluster, controller),
        cast(LongPollClient, ScriptedListener()),
        LoopClock(),
        random.Random(1),
        ScriptedRoutes(),
        WaitingCalls(),
        {},
    )
    replicas = routers.replica_set("b")
    if is_known:
        replicas.update(NOTHING)
        await asyncio.sleep(0.5)
    requests = []
    for _ in range(3):
        request = replicas.send(Envelope(EnvelopeKind.CALL, {}), nothing, keep)
        requests.append(asyncio.create_task(request))
        if is_known:
            await asyncio.sleep(0.4 * GATHER_S)
    if not is_known:
        await asyncio.sleep(0.5)
        assert controller.reports == []
        replicas.update(NOTHING)
    await asyncio.sleep(1.1 * GATHER_S)
    assert controller.reports == [(pytest.approx(0.5 + GATHER_S), {"b": [3, 0]})]
    routers.close()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(each, UnavailableError) for each in outcomes)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


class FullReplica(Controller):
    """One replica with one slot, which a request of another process occupies."""

    def handler_of(self, address: ActorAddress) -> Any:
        return partial(self.request, address)

    @by_task
    async def request(self, address: ActorAddress, envelope: Envelope, receive: Any, send: Any) -> Load:
        if envelope.queue_timeout is None:
            raise ReplicaBusyError("full", ongoing=1)
        await asyncio.get_running_loop().create_future()
        raise AssertionError


@pytest.mark.virtual_time
async def test_a_request_queued_at_a_replica_is_reported_once_as_waiting() -> None:
    """The replica does not count it as running, so the controller does not count it twice."""
    controller = FullReplica()
    routers = Routers(
        cast(Cluster, controller),
        cast(LongPollClient, ScriptedListener()),
        LoopClock(),
        random.Random(1),
        ScriptedRoutes(),
        WaitingCalls(),
        {},
    )
    replicas = routers.replica_set("b")
    replicas.update(NOTHING | {"replicas": [["r", "worker", 1]]})
    requests = [
        asyncio.create_task(replicas.send(Envelope(EnvelopeKind.CALL, {}), nothing, keep)) for _ in range(3)
    ]
    await asyncio.sleep(1.5 * PERIOD_S)
    assert controller.reports[-1] == (PERIOD_S, {"b": [3, 0]})
    for task in requests:
        task.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    routers.close()
    await asyncio.sleep(0)


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def keep(message: Message) -> None:
    pass


@pytest.mark.virtual_time
async def test_reports_stop_when_the_instance_has_ended() -> None:
    controller, reports = make(b=Queue(waiting=1))
    controller.errors = [NotRunningError("it has been shut down")]
    reports.report_soon(is_urgent=True)
    await asyncio.sleep(0.5 * PERIOD_S)
    assert controller.reports == []
    controller.is_ended = True
    await asyncio.sleep(2 * PERIOD_S)
    assert len(asyncio.all_tasks()) == 1
    reports.close()
    reports.report_soon(is_urgent=True)
    assert len(asyncio.all_tasks()) == 1
