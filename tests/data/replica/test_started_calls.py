"""Calls that a replica answers without a task: their ends, and that each gives its slot back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from started_requests import DEADLINE_S, Answers, began, held, run_replica, until

from daskserve.common.types import Envelope, EnvelopeKind, Load
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.replica import Replica
from daskserve.errors import ActorLostError, UserCodeError
from daskserve.payload import pickling
from daskserve.payload.packed_errors import PackedError


class Backend:
    def __call__(self, request: Any) -> Any:
        return request

    def plain(self, value: Any) -> Any:
        return value

    async def coroutine(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    def awaitable(self, value: Any) -> Awaitable[Any]:
        return self.coroutine(value)

    def fail(self, value: Any) -> Any:
        raise KeyError(value)

    async def cancel_itself(self, value: Any) -> Any:
        raise asyncio.CancelledError

    def hang(self, value: Any) -> Any:
        began.set()
        held.wait(DEADLINE_S)

    async def sleep(self, value: Any) -> Any:
        began.set()
        await asyncio.Event().wait()


def call(method: str, value: Any = 7, **head: Any) -> Envelope:
    return Envelope(EnvelopeKind.CALL, {"method": method, **head}, pickling.dump(((value,), {})))


Run = Callable[[Callable[[Replica], Awaitable[None]]], None]


@pytest.fixture(params=["own", "worker"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a scenario with a replica whose async code has an event loop of its own, or the worker's."""
    return partial(run_replica, Backend, call("plain"), event_loop=request.param)


@pytest.mark.parametrize("method", ["plain", "coroutine", "awaitable"])
def test_the_answer_comes_with_the_load_after_it(method: str, run: Run) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        assert replica.handle(call(method)).start(answers) is not None
        assert replica.load() == Load(1, 0)
        await until(lambda: answers.ends)
        ((message, load),) = answers.ends
        assert message is not None
        assert pickling.load(message["payload"]) == 7
        assert load == replica.load() == Load(0, 0)

    run(scenario)


@pytest.mark.parametrize(("method", "kind"), [("fail", KeyError), ("cancel_itself", UserCodeError)])
def test_errors_are_outcomes(method: str, kind: type[Exception], run: Run) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        replica.handle(call(method)).start(answers)
        await until(lambda: answers.ends)
        ((message, error),) = answers.ends
        assert message is None
        assert isinstance(error, PackedError)
        assert isinstance(error.load(), kind)
        assert replica.load() == Load(0, 0)

    run(scenario)


@pytest.mark.parametrize("method", ["hang", "sleep"])
def test_what_is_given_up_tells_nobody_and_keeps_its_slot_until_its_code_ends(method: str, run: Run) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        give_up = replica.handle(call(method)).start(answers)
        assert give_up is not None
        await until(began.is_set)
        give_up()
        give_up()
        if method == "hang":
            assert replica.load().ongoing == 1
        held.set()
        await until(lambda: replica.load().ongoing == 0)
        give_up()
        assert answers.ends == []

    run(scenario)


def test_what_is_given_up_after_its_answer_counts_once(run: Run) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        give_up = replica.handle(call("plain")).start(answers)
        assert give_up is not None
        await until(lambda: answers.ends)
        give_up()
        assert len(answers.ends) == 1
        assert replica.load() == Load(0, 0)

    run(scenario)


def test_a_replica_that_stops_ends_its_calls(run: Run) -> None:
    answers = Answers()

    async def scenario(replica: Replica) -> None:
        replica.handle(call("sleep")).start(answers)
        await until(began.is_set)
        await replica.stop(0)
        ((message, error),) = answers.ends
        assert message is None
        assert isinstance(error, ActorLostError)

    run(scenario)


def test_it_takes_only_what_has_to_wait_for_nothing(run: Run) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        for refused in (call("plain", stream=True), call("unknown")):
            assert replica.handle(refused).start(answers) is None
        for _ in range(2):
            assert replica.handle(call("hang")).start(answers) is not None
        assert replica.handle(call("plain")).start(answers) is None  # it is full
        assert replica.load().ongoing == 2
        held.set()
        await until(lambda: len(answers.ends) == 2)

    run(scenario)


def test_a_call_that_cannot_be_started_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    async def scenario(replica: Replica) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(UserExecutor, "start", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                replica.handle(call("plain")).start(Answers())
        assert replica.load() == Load(0, 0)

    run(scenario)
