"""A worker while its scheduler is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.dask.worker_closing import WorkerOutcome
from daskserve.cluster.protocols.base import EPOCH_BITS, ActorSpec, HostedActor, verb, verbs_of
from daskserve.cluster.worker import reconnect
from daskserve.cluster.worker.reconnect import Reconnection
from daskserve.cluster.worker.retirement import COMPLETE_S
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorKind
from daskserve.errors import UnavailableError
from daskserve.testing import run_virtual

GRACE_S = 60.0
LEFT = {"workers": ["here"], "epoch": 4, "records": {"backend/b": b"..."}}


class Actor:
    def __init__(self, spec: ActorSpec, stops: list[tuple[str, float]]) -> None:
        self._name = spec.name
        self._stops = stops
        self.verbs = verbs_of(self)

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def stop(self, grace_s: float) -> None:
        self._stops.append((self._name, grace_s))

    def samples(self) -> Iterable[Any]:
        return ()

    @verb
    async def hand_over(self) -> dict[str, Any]:
        return LEFT


class Lost:
    """A worker with a controller, a replica and a proxy, whose scheduler dies at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, back_after_s: float, task_s: float = 0.0) -> None:
        self.stops: list[tuple[str, float]] = []
        self.asked: list[tuple[float, Mapping[str, Any]]] = []
        self.registered_at: float | None = None
        self.next_id = "next"
        self.is_present = True
        self.answer: Callable[[], bool] = lambda: True
        self.kinds = [ActorKind.REPLICA, ActorKind.PROXY, ActorKind.CONTROLLER]

        async def wait(address: str, *_: Any, is_awaited: Callable[[], bool], **__: Any) -> str:
            await asyncio.sleep(min(back_after_s, GRACE_S))
            if back_after_s > GRACE_S or not is_awaited():
                raise OSError("it did not come back")
            return self.next_id

        async def register(_: Any) -> None:
            self.registered_at = self._now()

        async def bring_back(_: Any, start: Mapping[str, Any], worker: str, left: Mapping[str, Any]) -> bool:
            assert (start["instance"], worker) == ("a", "here")
            self.asked.append((self._now(), left))
            return self.answer()

        replacements = {
            "answer_close": lambda worker, survive, _: setattr(worker, "survive", survive),
            "connection_args": lambda _: {},
            "forget_tasks": lambda _: self._now() >= back_after_s + task_s,
            "import_definition": lambda _: bring_back,
            "is_present": lambda _: self.is_present,
            "pause_heartbeat": lambda _: None,
            "register_again": register,
            "scheduler_id": lambda _: "lost",
            "wait_for_scheduler": wait,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(reconnect, name, replacement)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def survive(self, then_s: float = 0.0, serves: bool = True) -> WorkerOutcome:
        def make(spec: ActorSpec) -> HostedActor:
            actor: Any = Actor(spec, self.stops)
            return actor

        worker: Any = SimpleNamespace(address="here", scheduler=SimpleNamespace(address="there"))
        connection: Any = SimpleNamespace(client=None, clock=LoopClock())
        registry = ActorRegistry("here", 1, LoopClock(), make)
        for kind in self.kinds:
            incarnation = 4 if kind is ActorKind.CONTROLLER else (3 << EPOCH_BITS) + 1
            spec = {"kind": kind.value, "name": f"a/{kind.value}", "incarnation": incarnation}
            spec["instance"] = "a"
            await registry.create({**spec, "payload": b""})
        found = Reconnection(worker, registry, GRACE_S)
        found.open(connection, partial(registry.drain, COMPLETE_S))
        if serves:
            found.starts["a"] = {"instance": "a", "store": "sqlite:///a.db"}
        outcome: WorkerOutcome = await worker.survive()
        await asyncio.sleep(then_s)
        self.starts = dict(found.starts)
        return outcome


def test_a_worker_keeps_its_actors_and_registers_with_the_next_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Lost(monkeypatch, back_after_s=50)
    assert run_virtual(lost.survive, 1.0) is WorkerOutcome.STAYS
    assert lost.registered_at == 50
    assert lost.asked == [(50, LEFT)]
    assert lost.stops == []


def test_a_worker_without_a_controller_reports_the_newest_epoch_of_its_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Lost(monkeypatch, back_after_s=1)
    lost.kinds = [ActorKind.REPLICA]
    run_virtual(lost.survive, 1.0)
    assert lost.asked == [(1, {"epoch": 3})]


def test_a_worker_asks_until_the_instance_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(monkeypatch, back_after_s=1)

    def answer() -> bool:
        if len(lost.asked) == 1:
            raise UnavailableError("not yet")
        return len(lost.asked) == 3

    lost.answer = answer
    run_virtual(lost.survive, 10.0)
    assert len(lost.asked) == 3
    assert "a" in lost.starts


def test_an_instance_that_does_not_come_back_ends_after_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(monkeypatch, back_after_s=1)
    lost.answer = lambda: False
    assert run_virtual(lost.survive, GRACE_S + 5) is WorkerOutcome.STAYS
    assert [name for name, _ in lost.stops] == ["a/controller", "a/proxy", "a/replica"]
    assert lost.starts == {}


def test_a_worker_whose_scheduler_stays_away_lets_its_requests_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Lost(monkeypatch, back_after_s=100)
    assert run_virtual(lost.survive) is WorkerOutcome.CLOSES
    assert lost.stops == [("a/controller", COMPLETE_S), ("a/proxy", COMPLETE_S), ("a/replica", COMPLETE_S)]


def test_a_worker_that_is_closed_meanwhile_does_not_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(monkeypatch, back_after_s=5)
    lost.is_present = False
    assert run_virtual(lost.survive) is WorkerOutcome.CLOSES
    assert lost.stops == []


def test_a_worker_without_an_instance_closes_as_dask_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(monkeypatch, back_after_s=0)
    assert run_virtual(lost.survive, 0.0, False) is WorkerOutcome.CLOSES
    assert lost.registered_at is None


def test_a_worker_that_a_living_scheduler_has_dropped_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(monkeypatch, back_after_s=0)
    lost.next_id = "lost"
    assert run_virtual(lost.survive) is WorkerOutcome.CLOSES
    assert lost.registered_at is None


def test_a_worker_waits_a_moment_for_a_running_task(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(monkeypatch, back_after_s=5, task_s=0.6)
    assert run_virtual(lost.survive) is WorkerOutcome.STAYS


def test_a_worker_with_a_long_task_asks_for_its_instance_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Lost(monkeypatch, back_after_s=5, task_s=100)
    lost.answer = lambda: False
    assert run_virtual(lost.survive) is WorkerOutcome.RESTARTS
    assert len(lost.asked) == 1
    assert lost.stops[0] == ("a/controller", COMPLETE_S)
    assert lost.registered_at is None
