"""Handles and responses as their callers use them: options, results, cancellation, errors, the context."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve import errors
from daskserve.client.client import Client
from daskserve.common.types import KeptPayload
from daskserve.data.caller.calls.broadcast import BroadcastResponse
from daskserve.data.caller.calls.response import FutureResponse, Response
from daskserve.errors import (
    BadRequestError,
    ClosedError,
    DeploymentUnavailableError,
    ReplicaStartError,
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestTimeoutError,
    ServeError,
    StreamOptionError,
    UserCodeError,
)
from daskserve.loops.pending_call import PendingCall
from daskserve.testing import local_instance

DEADLINE_S = 20.0


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Echo:
    """Answers, waits and fails as requested, and records its calls."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.notes: list[str] = []

    async def __call__(self, value: Any = None) -> Any:
        return value

    def context(self) -> dict[str, Any]:
        request = serve.context.get_request_context()
        names = ("request_id", "route", "app_name", "multiplexed_model_id", "session_id")
        return {name: getattr(request, name) for name in names}

    def fail(self) -> None:
        raise UnpicklableError("secret cause")

    def wait(self) -> str:
        assert self.gate.wait(DEADLINE_S)
        return serve.get_current_replica_tag()

    def who(self) -> str:
        return serve.get_current_replica_tag()

    def count(self, limit: int) -> Iterator[int]:
        yield from range(limit)

    async def hang(self) -> None:
        self.notes.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise

    async def noted(self) -> list[str]:
        return self.notes

    async def open(self) -> None:
        self.gate.set()


class Outer:
    """Calls another deployment."""

    def __init__(self, inner: serve.Handle) -> None:
        self.inner = inner
        self.caught = ""

    async def context(self) -> dict[str, Any]:
        return dict(await self.inner.context.remote())

    async def hang(self) -> None:
        await self.inner.hang.remote()

    def hang_in_thread(self) -> None:
        try:
            self.inner.hang.remote().result()
        except RequestCancelledError as error:
            self.caught = str(error)
            raise

    async def caught_text(self) -> str:
        return self.caught

    async def blocks(self) -> str:
        try:
            return str(self.inner.wait.remote().result())
        except RuntimeError as error:
            return str(error)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_instance(workers=2) as client:
        yield client


@pytest.fixture
def echo(client: Client, request: pytest.FixtureRequest) -> serve.Handle:
    client.deploy(request.node.name, Echo, config={"max_concurrent_queries": 8}, route_prefix=None)
    return client.get_handle(request.node.name)


@pytest.fixture
def outer(client: Client, echo: serve.Handle, request: pytest.FixtureRequest) -> serve.Handle:
    name = f"outer-{request.node.name}"
    client.deploy(name, Outer, echo, config={"max_concurrent_queries": 8}, route_prefix=None)
    return client.get_handle(name)


def poll(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline


def wait_for_note(echo: serve.Handle, note: str) -> None:
    poll(lambda: note in echo.noted.remote().result(DEADLINE_S))


def run(coroutine: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(main())


# ---- options


@pytest.mark.parametrize("serialization", ["cloudpickle", "pickle", "msgpack"])
def test_arguments_and_results_take_any_serialization(echo: serve.Handle, serialization: str) -> None:
    handle = echo.options(request_serialization=serialization, response_serialization=serialization)
    assert handle.remote({"x": [1, 2]}).result(DEADLINE_S) == {"x": [1, 2]}
    assert handle.remote(value="by name").result(DEADLINE_S) == "by name"


def test_orjson_is_used_where_it_is_installed(echo: serve.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)
    with pytest.raises(ValueError, match="pip install orjson"):
        echo.options(request_serialization="orjson")
    fake: Any = SimpleNamespace(
        dumps=lambda value, option: json.dumps(value).encode(), loads=json.loads, OPT_SERIALIZE_NUMPY=1
    )
    monkeypatch.setitem(sys.modules, "orjson", fake)
    handle = echo.options(request_serialization="orjson", response_serialization="orjson")
    assert handle.remote((1, 2)).result(DEADLINE_S) == [1, 2]  # JSON has no tuples


def test_values_that_a_format_cannot_hold_are_refused(echo: serve.Handle) -> None:
    for value in (object(), 2**70, "\ud800"):
        with pytest.raises(BadRequestError, match="cannot be serialized with msgpack"):
            echo.options(request_serialization="msgpack").remote(value)
    with pytest.raises(UserCodeError, match="cannot be serialized with msgpack"):
        echo.options(response_serialization="msgpack").remote({1, 2}).result(DEADLINE_S)


def test_an_argument_that_cannot_be_pickled_is_named(echo: serve.Handle) -> None:
    def use(*args: Any, **kwargs: Any) -> serve.handle.Response:
        return echo.remote(*args, **kwargs)

    lock = threading.Lock()
    for call, place in (
        (lambda: use({"lock": lock}), "argument 1['lock']"),
        (lambda: use(1, key=[lock]), "argument 'key'[0]"),
        (lambda: use(use(1), lock), "argument 2"),  # a response, which is not pickled
    ):
        with pytest.raises(
            errors.UnpicklableError, match=re.escape(f"{place} is of type threading.Lock")
        ) as caught:
            call()
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("option", ["request_serialization", "response_serialization"])
def test_an_unknown_serialization_is_a_value_error(echo: serve.Handle, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of cloudpickle, pickle, msgpack, orjson"):
        echo.options(**{option: "xml"})


def test_options_with_and_without_effect_are_accepted_and_others_listed(echo: serve.Handle) -> None:
    handle = echo.options(_prefer_local_routing=False, _by_reference=False, session_id="s", stream=False)
    assert handle.remote(1).result(DEADLINE_S) == 1
    with pytest.raises(TypeError, match=r"no option 'by_reference'.*multiplexed_model_id.*_by_reference"):
        echo.options(by_reference=False)
    with pytest.raises(ValueError, match="timeout_s must be more than 0, or None; got '5'"):
        echo.options(timeout_s="5")
    with pytest.raises(ValueError, match="shard_key must be a string; got 7"):
        echo.options(shard_key=7)
    with pytest.raises(ValueError, match="session_id must be a string; got 7"):
        echo.options(session_id=7)


def test_an_unknown_method_lists_the_others(echo: serve.Handle) -> None:
    with pytest.raises(AttributeError, match=r"has no method 'nope'; it has: .*noted") as caught:
        _ = echo.nope
    assert isinstance(caught.value, ServeError)
    with pytest.raises(BadRequestError, match=r"no public method 'nope'; it has: .*noted"):
        echo.options(method_name="nope").remote().result(DEADLINE_S)


# ---- results


def test_a_result_can_be_read_twice_and_a_late_one_is_a_timeout(echo: serve.Handle) -> None:
    response = echo.wait.remote()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        response.result(timeout_s=0.01)
    echo.open.remote().result(DEADLINE_S)

    async def main() -> None:
        assert await response == await response

    run(main())


@each_case("kind", [Response, FutureResponse])
def test_threads_that_read_a_large_result_at_once_share_its_fetch(kind: type[Response]) -> None:
    future: PendingCall[Any] = PendingCall()
    future.set_result(KeptPayload("worker", "token", 1 << 23, lambda: None))
    found: list[Any] = []

    def fetch() -> Any:
        return response._placed() if isinstance(response, FutureResponse) else response._fetched()

    def post(begin: Any, connection: Any, running: Any, call: Any) -> None:
        running.close()
        if not found:
            found.append(None)
            found.append(fetch())  # another thread reads at this moment

    connection: Any = SimpleNamespace(
        is_closed=False,
        runs_here=lambda: False,
        thread_calls=SimpleNamespace(post=post),
        values=SimpleNamespace(keep=asyncio.sleep),
    )
    response = kind(future, connection, "id", connection)
    assert fetch() is found[1]
    assert fetch() is found[1]


def test_result_is_refused_in_an_event_loop(echo: serve.Handle, outer: serve.Handle) -> None:
    assert "would block the running event loop; await" in outer.blocks.remote().result(DEADLINE_S)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="await the response"):
            echo.wait.remote().result()

    run(main())
    echo.open.remote().result(DEADLINE_S)


def test_an_error_that_cannot_be_pickled_keeps_its_class(echo: serve.Handle) -> None:
    with pytest.raises(UnpicklableError, match=r"^secret cause$") as caught:
        echo.fail.remote().result(DEADLINE_S)
    assert "in fail" in str(caught.value.__cause__)


# ---- cancellation


def test_a_cancelled_request_says_so_to_all_readers(echo: serve.Handle) -> None:
    response = echo.hang.remote()
    wait_for_note(echo, "begun")
    assert response.cancel()
    response.cancel()
    assert response.cancelled()
    with pytest.raises(RequestCancelledError, match=response.request_id):
        response.result()

    async def main() -> None:
        with pytest.raises(RequestCancelledError, match="was cancelled"):
            await response

    run(main())
    wait_for_note(echo, "cancelled")


@pytest.mark.parametrize("method", ["hang", "hang_in_thread"])
def test_a_cancelled_request_cancels_the_calls_made_for_it(
    echo: serve.Handle, outer: serve.Handle, method: str
) -> None:
    response = outer.options(method_name=method).remote()
    wait_for_note(echo, "begun")
    response.cancel()
    wait_for_note(echo, "cancelled")
    if method == "hang_in_thread":
        poll(lambda: "together with the request" in outer.caught_text.remote().result(DEADLINE_S))


def test_a_queued_request_is_dropped_when_it_is_cancelled(client: Client) -> None:
    client.deploy("narrow", Echo, config={"max_concurrent_queries": 1})
    handle = client.get_handle("narrow")
    first = handle.wait.remote()
    queued = handle.hang.remote()
    assert queued.cancel()
    handle.broadcast("open").results(DEADLINE_S)
    first.result(DEADLINE_S)
    assert handle.noted.remote().result(DEADLINE_S) == []


def test_a_stream_has_its_own_errors(echo: serve.Handle) -> None:
    stream = echo.options(method_name="count", stream=True).remote(2)
    with pytest.raises(TypeError, match="many results"):
        stream.result()
    assert list(stream) == [0, 1]
    assert not stream.cancelled()
    with pytest.raises(TypeError, match="not a generator"):
        list(echo.options(stream=True).remote(1))
    with pytest.raises(TypeError, match="is a generator"):
        echo.count.remote(1).result(DEADLINE_S)


# ---- the request context


def test_calls_inherit_the_request_id_and_carry_ids_of_their_own(
    echo: serve.Handle, outer: serve.Handle
) -> None:
    response = outer.context.remote()
    assert response.result(DEADLINE_S) == {
        "request_id": response.request_id,
        "route": "",
        "app_name": "default",
        "multiplexed_model_id": "",
        "session_id": "",
    }
    ids = {"multiplexed_model_id": "m1", "session_id": "s1"}
    found = echo.options(method_name="context", **ids).remote().result(DEADLINE_S)
    assert {name: found[name] for name in ids} == ids
    with pytest.raises(serve.errors.ServeError, match="does not answer a daskserve request"):
        serve.context.get_request_context()


# ---- all replicas, one replica


def test_a_broadcast_reaches_every_replica_even_a_full_one(client: Client) -> None:
    client.deploy("three", Echo, config={"num_replicas": 3, "max_concurrent_queries": 1})
    handle = client.get_handle("three")
    waiting = [handle.wait.remote() for _ in range(3)]
    tags = handle.broadcast("who").results(DEADLINE_S)
    assert len(set(tags)) == 3
    assert run(handle.broadcast("__call__", 7).results_async()) == [7, 7, 7]
    errors = handle.broadcast("nope").results(DEADLINE_S, return_exceptions=True)
    assert [type(each) for each in errors] == [BadRequestError] * 3
    with pytest.raises(BadRequestError):
        handle.broadcast("nope").results(DEADLINE_S)
    slow = handle.broadcast("hang")
    with pytest.raises(TimeoutError, match="Not all replicas"):
        slow.results(timeout_s=0.01)
    slow.cancel()
    with pytest.raises(RequestCancelledError):
        slow.results()
    handle.broadcast("open").results(DEADLINE_S)
    assert sorted(each.result(DEADLINE_S) for each in waiting) == tags


def test_a_broadcast_that_was_not_sent_raises_why() -> None:
    """The reason may be a timeout, too, but it is not an answer of a replica."""
    future: PendingCall[Any] = PendingCall()
    error = RequestTimeoutError("The controller sent no update.")
    connection: Any = SimpleNamespace(runs_here=lambda: future.set_error(error))  # checked before the wait
    with pytest.raises(RequestTimeoutError, match="sent no update"):
        BroadcastResponse(future, connection, "id").results()


def test_a_chosen_replica_keeps_a_slot_for_one_call(client: Client) -> None:
    client.deploy("chosen", Echo, config={"num_replicas": 2, "max_concurrent_queries": 1})
    handle = client.get_handle("chosen")

    async def main() -> None:
        async with handle.choose_replica() as one, handle.choose_replica() as other:
            assert one.replica_id != other.replica_id
            plain = one.to_dict()
            assert (plain["replica_id"], plain["address"]) == (one.replica_id, one.address)
            assert "choice" not in plain
            assert pickle.loads(pickle.dumps(one)) == one
            queued = handle.remote("queued")
            assert await handle.who.dispatch(one) == one.replica_id
            assert await queued == "queued"
            with pytest.raises(RuntimeError, match="has been used"):
                handle.dispatch(one)
        with pytest.raises(RuntimeError, match="released at the end"):
            handle.dispatch(other)
        async with handle.choose_replica(), handle.choose_replica():
            pass  # both slots are free again
        counting = handle.options(method_name="count", stream=True)
        async with counting.choose_replica() as selection:
            with pytest.raises(StreamOptionError):
                handle.dispatch(selection)
            assert [each async for each in counting.dispatch(selection, handle.remote(3))] == [0, 1, 2]

    run(main())


def test_a_chosen_replica_is_that_of_the_session_and_waits_with_its_priority(client: Client) -> None:
    config = {"request_router_class": "ConsistentHash"}
    echo = serve.deployment(num_replicas=4, request_router_config=config)(Echo)
    handle = client.run(echo.bind(), name="sessions", route_prefix=None)

    async def main() -> None:
        for session in ("a", "b", "c"):
            same = handle.options(session_id=session)
            async with same.choose_replica() as selection:
                assert await same.who.dispatch(selection) == await same.who.remote()

    run(main())


def test_a_batch_request_with_a_session_does_not_wait_for_a_replica_that_is_kept_free(client: Client) -> None:
    """The first replica refuses requests of batch jobs for half a minute after a live request."""
    config = {"request_router_class": "ConsistentHash"}
    echo = serve.deployment(num_replicas=2, max_ongoing_requests=1, request_router_config=config)(Echo)
    handle = client.run(echo.bind(), name="kept_free", route_prefix=None)
    for number in range(20):
        session = handle.options(session_id=str(number))
        assert session.remote(1).result(timeout_s=DEADLINE_S) == 1
        assert session.options(priority=-60).remote(2).result(timeout_s=DEADLINE_S) == 2


def test_a_dispatched_call_ends_at_its_timeout_and_frees_the_slot(client: Client) -> None:
    client.deploy("timed", Echo, config={"max_concurrent_queries": 1})
    handle = client.get_handle("timed")

    async def main() -> None:
        async with handle.choose_replica() as selection:
            late = handle.options(method_name="hang", timeout_s=0.05).dispatch(selection)
            with pytest.raises(TimeoutError, match="was not answered before its deadline"):
                await asyncio.wait_for(late, DEADLINE_S)
            assert await handle.remote(1) == 1

    run(main())


def test_a_dispatched_call_that_is_cancelled_frees_the_slot(client: Client) -> None:
    client.deploy("cancelled", Echo, config={"max_concurrent_queries": 1})
    handle = client.get_handle("cancelled")

    async def main() -> None:
        async with handle.choose_replica() as selection:
            hanging = handle.options(method_name="hang").dispatch(selection)
            hanging.cancel()
            assert await asyncio.wait_for(handle.remote(1), DEADLINE_S) == 1

    run(main())


def test_reserved_slots_are_taken_from_others(client: Client) -> None:
    client.deploy("reserved", Echo, config={"max_concurrent_queries": 1, "max_queued_requests": 1})
    handle = client.get_handle("reserved")

    async def main() -> None:
        async with handle.choose_replica():
            waiting = handle.remote(0)  # the request that may run
            with pytest.raises(serve.errors.BackPressureError) as caught:
                await handle.remote(1)
            assert caught.value.max_queued_requests == 1
            assert caught.value.http_status == 503
        assert await waiting == 0

    run(main())


def test_a_selection_is_for_its_own_deployment_and_replica(client: Client, echo: serve.Handle) -> None:
    client.deploy("leaves", Echo, config={"graceful_shutdown_timeout_s": 0})
    handle = client.get_handle("leaves")

    async def main() -> None:
        with pytest.raises(ValueError, match="was not chosen by a handle of 'leaves'"):
            handle.dispatch("no selection")  # type: ignore[arg-type]
        async with handle.choose_replica() as selection:
            with pytest.raises(ValueError, match="was not chosen by a handle"):
                echo.dispatch(selection)
            await asyncio.to_thread(client.delete_deployment, "leaves")
            with pytest.raises(ReplicaUnavailableError, match=selection.replica_id):
                handle.dispatch(selection)

    run(main())


# ---- the end


def test_a_shut_down_handle_fails_and_others_continue(client: Client, echo: serve.Handle) -> None:
    other = echo.options(method_name="__call__")
    echo.shutdown()
    with pytest.raises(ClosedError, match="was shut down"):
        echo.remote(1)
    assert other.remote(2).result(DEADLINE_S) == 2
    run(other.shutdown_async())
    with pytest.raises(ClosedError):
        other.remote(1)
    assert client.get_handle(other._endpoint).remote(3).result(DEADLINE_S) == 3


class Gate:
    """Travels by reference within this process."""

    opened = threading.Event()

    def __reduce__(self) -> Any:
        return Gate, ()


def test_a_call_that_waits_for_a_deploy_fails_with_it(client: Client) -> None:
    class Fails:
        def __init__(self, gate: Gate) -> None:
            gate.opened.wait(DEADLINE_S)
            raise ValueError("bad model")

        def __call__(self) -> None: ...

    failed: list[BaseException] = []

    def deploy() -> None:
        try:
            client.deploy("bad", Fails, Gate())
        except ReplicaStartError as error:
            failed.append(error)

    deploying = threading.Thread(target=deploy)
    deploying.start()
    try:
        poll(lambda: "bad" in client.view("get_all_endpoints"))
        handle = client.get_handle("bad")
        response = handle.remote()
        assert not response.done()
    finally:
        Gate.opened.set()
    text = "'bad' is unavailable because it failed to deploy.*bad model"
    with pytest.raises(DeploymentUnavailableError, match=text):
        response.result(DEADLINE_S)
    deploying.join(DEADLINE_S)
    assert failed
    with pytest.raises(DeploymentUnavailableError, match=text):
        handle.remote().result(DEADLINE_S)


class Took:
    """A call that ends two seconds after a reader begins to wait for it."""

    leaves_value = False

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.is_over = False

    def wait(self, timeout_s: float) -> bool:
        self.is_over = timeout_s >= 2
        self.clock.time += min(timeout_s, 2.0)
        return self.is_over

    def done(self) -> bool:
        return self.is_over

    def cancelled(self) -> bool:
        return False

    cancel = exception = cancelled


def test_a_timeout_counts_the_wait_for_an_answer_and_for_a_large_result() -> None:
    clock = SimpleNamespace(time=0.0, now=lambda: clock.time)
    connection: Any = SimpleNamespace(clock=clock, current_task=lambda: None, runs_here=lambda: False)
    unused: Any = None
    for kind, later in ((Response, "_fetching"), (FutureResponse, "_placing")):
        clock.time = 0.0
        response = kind(Took(clock), connection, "r", unused)  # type: ignore[arg-type]
        response._failure = lambda future: None  # type: ignore[method-assign]
        setattr(response, later, Took(clock))
        with pytest.raises(RequestTimeoutError, match="within 3 s"):
            response.result(3)
        assert clock.time == 3.0
