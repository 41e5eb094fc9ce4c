"""Streams of Python results, from a generator in a replica to its caller (features HD06, ST02, ST05, ST06).

Each case runs on an instance in this process, with user code on its own loop and on the worker's. Cases that
depend on the process boundary also run in a child process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from tables import case

import daskserve as serve
from daskserve.data.replica.requests.accept_batch import accept_batch
from daskserve.errors import (
    PassedResponseError,
    ReplicaBusyError,
    RequestCancelledError,
    RequestTimeoutError,
    StreamOptionError,
    UnavailableError,
)
from daskserve.testing import local_instance

DEADLINE_S = 20.0


class Streams:
    """Plain and async generators that record their ends; they use nothing of the test's process."""

    def __init__(self) -> None:
        self.made = 0
        self.notes: list[str] = []
        self.go = threading.Event()

    def reset(self) -> None:
        self.made = 0
        self.notes.clear()
        self.go.clear()

    def told(self) -> tuple[int, list[str]]:
        return self.made, list(self.notes)

    def let_go(self) -> None:
        self.go.set()

    # ---- plain, in threads

    def numbers(self, count: int, size_bytes: int = 0) -> Iterator[Any]:
        try:
            for number in range(count):
                self.made += 1
                yield (number, bytes(size_bytes)) if size_bytes else number
        except GeneratorExit:
            self.notes.append("left")
            raise
        finally:
            self.notes.append("closed")

    def thread(self) -> Iterator[str]:
        yield threading.current_thread().name

    def gated(self) -> Iterator[str]:
        yield "first"
        self.go.wait(DEADLINE_S)
        yield "second"

    def broken(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise KeyError("in the middle")

    # ---- async

    async def numbers_async(self, count: int, size_bytes: int = 0) -> AsyncIterator[Any]:
        try:
            for number in range(count):
                self.made += 1
                yield (number, bytes(size_bytes)) if size_bytes else number
        except (GeneratorExit, asyncio.CancelledError):
            self.notes.append("left")
            raise
        finally:
            self.notes.append("closed")

    async def thread_async(self) -> AsyncIterator[str]:
        yield threading.current_thread().name

    async def gated_async(self) -> AsyncIterator[str]:
        yield "first"
        while not self.go.is_set():  # noqa: ASYNC110 - set in another thread
            await asyncio.sleep(0.001)
        yield "second"

    async def broken_async(self, after: int) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        raise KeyError("in the middle")

    # ---- by detours

    async def returns_async(self) -> Any:
        return self.numbers_async(3)

    async def returns_plain(self) -> Any:
        return self.numbers(3)

    def returns_async_from_thread(self) -> Any:
        return self.numbers_async(3)

    def returns_awaitable(self) -> Any:
        return self.returns_plain()

    def returns_iterator(self) -> Any:
        return map(int, "012")

    # ---- no streams

    def one(self) -> int:
        return 1

    async def one_async(self) -> list[int]:
        return [1]

    def failing(self) -> Iterator[int]:
        raise ZeroDivisionError("before there was a generator")

    @accept_batch
    def many(self, requests: list[Any]) -> list[Any]:
        return requests

    def unpicklable(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    def stubborn(self) -> Iterator[int]:
        try:
            while True:
                yield 1
        except GeneratorExit:
            self.notes.append("refused")
            yield 2

    def endless(self, request: Any) -> Iterator[int]:
        return self.numbers(10**9)

    def told_by_classic(self, request: Any) -> Any:
        return self.told()

    def busy(self) -> Iterator[int]:
        self.made += 1
        yield from ()
        raise ReplicaBusyError("full")

    async def busy_async(self) -> AsyncIterator[int]:
        self.made += 1
        for item in ():
            yield item
        raise ReplicaBusyError("full")

    def busy_at_once(self) -> Iterator[int]:
        self.made += 1
        raise ReplicaBusyError("full")

    def __call__(self, request: Any) -> Iterator[Any]:
        yield request.data
        yield request.query_params["n"]


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        yield client


class Deployed:
    """A deployment of `Streams`. Some tests share one, so that leftovers of one test show in the others."""

    def __init__(self, client: serve.Client, name: str, **config: Any) -> None:
        client.deploy(name, Streams, config={"max_concurrent_queries": 24, **config})
        self.handle = client.get_handle(name)

    def stream(self, method: str, *args: Any) -> serve.handle.ResponseGenerator:
        return self.handle.options(method_name=method, stream=True).remote(*args)

    def ask(self, method: str) -> Any:
        return self.handle.options(method_name=method).remote().result(DEADLINE_S)

    def wait_for_note(self, note: str) -> list[str]:
        """Poll the replica until it has recorded a note; return all of its notes."""
        deadline = time.monotonic() + DEADLINE_S
        while note not in (notes := self.ask("told")[1]):
            assert time.monotonic() < deadline, notes
        return list(notes)


KINDS = {
    "own": {"event_loop": "own"},
    "worker": {"event_loop": "worker"},
    "process": {"isolation": "process"},
}


@pytest.fixture(scope="module", params=KINDS)
def shared(client: serve.Client, request: pytest.FixtureRequest) -> Deployed:
    return Deployed(client, f"streams-{request.param}", **KINDS[request.param])


@pytest.fixture
def everywhere(shared: Deployed) -> Iterator[Deployed]:
    shared.ask("reset")
    yield shared
    shared.ask("let_go")  # what still hangs in a thread may end


@pytest.fixture
def deployed(everywhere: Deployed) -> Deployed:
    return everywhere


def in_loop(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await scenario()

    return asyncio.run(main())


both = pytest.mark.parametrize("suffix", ["", "_async"])


# ---- items


@both
def test_items_come_in_order_to_threads_and_to_loops(everywhere: Deployed, suffix: str) -> None:
    method = f"numbers{suffix}"
    assert list(everywhere.stream(method, 500)) == list(range(500))

    async def scenario() -> list[Any]:
        return [number async for number in everywhere.stream(method, 500)]

    assert in_loop(scenario) == list(range(500))
    assert list(everywhere.stream(method, 0)) == []


@both
def test_each_item_comes_when_it_is_made(everywhere: Deployed, suffix: str) -> None:
    stream = everywhere.stream(f"gated{suffix}")
    assert next(stream) == "first"
    assert not stream.done()
    everywhere.ask("let_go")
    assert list(stream) == ["second"]
    assert stream.done()


def test_plain_generators_run_in_threads_and_async_ones_on_the_loop(client: serve.Client) -> None:
    deployed = Deployed(client, "threads")
    (plain,), (on_loop,) = deployed.stream("thread"), deployed.stream("thread_async")
    assert plain.rpartition("-")[0] == on_loop
    assert on_loop.startswith("daskserve-threads#")


def test_methods_may_return_a_stream_that_others_make(deployed: Deployed) -> None:
    for method in [
        "returns_async",
        "returns_plain",
        "returns_async_from_thread",
        "returns_awaitable",
        "returns_iterator",
    ]:
        with case(method):
            assert list(deployed.stream(method)) == [0, 1, 2]


def test_items_of_any_size_and_kind(everywhere: Deployed) -> None:
    large = list(everywhere.stream("numbers", 5, 3 << 20))
    assert [(number, len(data)) for number, data in large] == [(number, 3 << 20) for number in range(5)]


def test_arrays_are_streamed(client: serve.Client) -> None:
    async def arrays(request: Any) -> AsyncIterator[Any]:
        for number in range(4):
            yield np.full(100_000, number)

    client.create_backend("arrays", arrays)
    client.create_endpoint("arrays", backend="arrays")
    stream = client.get_handle("arrays").options(stream=True).remote()
    assert [(each.sum(), len(each)) for each in stream] == [(n * 100_000, 100_000) for n in range(4)]


def test_classic_backends_stream_too(client: serve.Client) -> None:
    client.create_backend("classic", Streams)
    client.create_endpoint("classic", backend="classic")
    handle = client.get_handle("classic").options(stream=True)
    assert list(handle.remote("data", n=7)) == ["data", 7]


def test_streams_run_side_by_side(everywhere: Deployed) -> None:
    async def scenario() -> list[list[Any]]:
        async def collect(stream: serve.handle.ResponseGenerator) -> list[Any]:
            return [item async for item in stream]

        methods = ["numbers", "numbers_async"] * 10
        return await asyncio.gather(*(collect(everywhere.stream(method, 40)) for method in methods))

    assert in_loop(scenario) == [list(range(40))] * 20


def test_a_backend_streams_from_another(client: serve.Client, deployed: Deployed) -> None:
    """With plain and async code, on a separate loop and on the loop that passes the items on."""

    class Relay:
        def __init__(self, inner: Any) -> None:
            self.inner = inner.options(stream=True)

        def plain(self, count: int) -> Iterator[Any]:
            for item in self.inner.numbers.remote(count):
                yield item + 1

        async def on_loop(self, count: int) -> AsyncIterator[Any]:
            async for item in self.inner.numbers_async.remote(count):
                yield item + 1

        def __call__(self, request: Any) -> None: ...

    for event_loop in ("own", "worker"):
        client.deploy("relay", Relay, deployed.handle, config={"event_loop": event_loop})
        handle = client.get_handle("relay").options(stream=True)
        for method in ("plain", "on_loop"):
            assert list(handle.options(method_name=method).remote(50)) == list(range(1, 51))


# ---- errors


@both
def test_an_error_in_the_middle_comes_after_the_items_with_its_traceback(
    everywhere: Deployed, suffix: str
) -> None:
    for after in (0, 3):
        stream = everywhere.stream(f"broken{suffix}", after)
        assert [next(stream) for _ in range(after)] == list(range(after))
        with pytest.raises(KeyError, match="in the middle") as caught:
            next(stream)
        assert 'KeyError("in the middle")' in str(caught.value.__cause__)
        assert list(stream) == []  # an error is told once


@both
def test_errors_reach_event_loops_too(deployed: Deployed, suffix: str) -> None:
    async def scenario() -> list[Any]:
        stream = deployed.stream(f"broken{suffix}", 2)
        items = [await anext(stream) for _ in range(2)]
        with pytest.raises(KeyError, match="in the middle"):
            await anext(stream)
        return items

    assert in_loop(scenario) == [0, 1]


def test_errors_before_the_first_item(deployed: Deployed) -> None:
    with pytest.raises(ZeroDivisionError, match="before there was a generator"):
        next(deployed.stream("failing"))
    with pytest.raises(serve.errors.ServeError, match="no public method 'missing'"):
        next(deployed.stream("missing"))
    with pytest.raises(TypeError, match="positional argument"):
        next(deployed.stream("numbers"))


def test_an_item_that_cannot_be_pickled_ends_the_stream(deployed: Deployed) -> None:
    stream = deployed.stream("unpicklable")
    assert next(stream) == 1
    with pytest.raises(serve.errors.ServeError, match=r"Method unpicklable .* returned a _thread\.lock"):
        next(stream)


# ---- what is no stream, and what is none but a stream


def test_a_stream_of_a_non_generator_is_rejected(everywhere: Deployed) -> None:
    for method in ["one", "one_async"]:
        with case(method):
            with pytest.raises(
                TypeError, match=f"Method {method} .* stream=True .* not a generator"
            ) as caught:
                next(everywhere.stream(method))
            assert isinstance(caught.value, StreamOptionError)


def test_a_stream_of_batches_is_rejected(deployed: Deployed) -> None:
    with pytest.raises(TypeError, match="takes batches"):
        next(deployed.stream("many"))


def test_a_generator_without_stream_is_rejected(everywhere: Deployed) -> None:
    for method in ["thread", "thread_async", "returns_plain", "returns_async_from_thread"]:
        with case(method):
            with pytest.raises(TypeError, match=r"handle\.options\(stream=True\)"):
                everywhere.ask(method)


def test_a_stream_is_no_single_response(deployed: Deployed) -> None:
    stream = deployed.stream("numbers", 2)
    with pytest.raises(TypeError, match="many results"):
        stream.result(1)

    async def scenario() -> None:
        with pytest.raises(TypeError, match="async for"):
            await stream

    in_loop(scenario)
    for try_to_pass in (lambda: pickle.dumps(stream), lambda: deployed.handle.remote(stream)):
        with pytest.raises(PassedResponseError, match="cannot be pickled, or passed"):
            try_to_pass()
    assert list(stream) == [0, 1]


def test_the_option_stays_with_copies_and_pickles_of_a_handle(deployed: Deployed) -> None:
    handle = deployed.handle.options(stream=True)
    assert isinstance(handle.numbers.remote(1), serve.handle.ResponseGenerator)
    assert isinstance(handle.options(stream=False).one.remote(), serve.handle.Response)
    assert isinstance(deployed.handle.one.remote(), serve.handle.Response)
    copy = pickle.loads(pickle.dumps(handle))
    assert type(copy) is type(handle)


# ---- flow


@both
def test_a_generator_waits_for_a_slow_caller(everywhere: Deployed, suffix: str) -> None:
    count, size_bytes = 2000, 10_000
    stream = everywhere.stream(f"numbers{suffix}", count, size_bytes)
    assert next(stream)[0] == 0
    settled = made = -1
    deadline = time.monotonic() + DEADLINE_S
    while made <= 0 or made != settled:
        assert time.monotonic() < deadline
        settled = made
        time.sleep(0.05)
        made = everywhere.ask("told")[0]
    assert made < 400  # 64 KiB at the caller, 16 items at the executor, and to and from a child 1 MiB each
    assert [number for number, _ in stream] == list(range(1, count))


# ---- the caller leaves


LEAVE: dict[str, Callable[[serve.handle.ResponseGenerator], Any]] = {
    "cancel": lambda stream: stream.cancel(),
    "close": lambda stream: stream.close(),
    "forget": lambda stream: None,
}


@both
@pytest.mark.parametrize("how", LEAVE)
def test_a_caller_that_leaves_has_the_generator_closed(everywhere: Deployed, suffix: str, how: str) -> None:
    stream = everywhere.stream(f"numbers{suffix}", 10**9)
    for item in stream:
        if item == 5:
            break
    LEAVE[how](stream)
    del stream
    assert everywhere.wait_for_note("closed") == ["left", "closed"]


@both
def test_a_caller_on_a_loop_that_leaves_has_the_generator_closed(deployed: Deployed, suffix: str) -> None:
    async def breaks() -> None:
        async for item in deployed.stream(f"numbers{suffix}", 10**9):
            if item == 5:
                return

    async def is_cancelled() -> None:
        async def iterate() -> None:
            async for _ in stream:
                began.set()

        stream = deployed.stream(f"gated{suffix}")
        began = asyncio.Event()
        task = asyncio.create_task(iterate())
        await began.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [item async for item in stream] == []

    async def closes() -> None:
        async with contextlib.aclosing(deployed.stream(f"numbers{suffix}", 10**9)) as stream:
            assert await anext(stream) == 0
        assert [item async for item in stream] == []

    in_loop(breaks)
    assert deployed.wait_for_note("closed") == ["left", "closed"]
    in_loop(is_cancelled)
    in_loop(closes)
    deadline = time.monotonic() + DEADLINE_S
    while deployed.ask("told")[1] != ["left", "closed"] * 2:
        assert time.monotonic() < deadline


def test_cancelling_wakes_all_waiters(everywhere: Deployed) -> None:
    stream = everywhere.stream("gated_async")
    assert next(stream) == "first"
    timer = threading.Timer(0.05, stream.cancel)
    timer.start()
    with pytest.raises(concurrent.futures.CancelledError):
        next(stream)
    assert stream.cancel() is False
    timer.join()

    async def scenario() -> None:
        stream = everywhere.stream("gated_async")
        assert await anext(stream) == "first"
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(RequestCancelledError, match=stream.request_id):
            await anext(stream)

    in_loop(scenario)


@both
def test_a_stream_ends_at_its_deadline(everywhere: Deployed, suffix: str) -> None:
    handle = everywhere.handle.options(method_name=f"numbers{suffix}", stream=True, timeout_s=0.3)
    stream = handle.remote(10**9)
    with pytest.raises(RequestTimeoutError):
        list(stream)
    assert everywhere.wait_for_note("closed") == ["left", "closed"]


def test_a_generator_that_refuses_to_end_does_not_hold_the_caller(client: serve.Client) -> None:
    deployed = Deployed(client, "one-more")
    stream = deployed.stream("stubborn")
    assert next(stream) == 1
    stream.close()
    assert list(stream) == []
    deployed.wait_for_note("refused")


@both
def test_an_open_stream_takes_a_slot_until_its_generator_has_ended(client: serve.Client, suffix: str) -> None:
    deployed = Deployed(client, f"narrow{suffix}", max_concurrent_queries=1)
    stream = deployed.stream(f"gated{suffix}")
    assert next(stream) == "first"
    other = deployed.handle.one.remote()
    with pytest.raises(RequestTimeoutError):
        other.result(0.1)
    stream.close()
    if not suffix:
        # A thread cannot be stopped: it keeps the slot until the generator reaches its next yield.
        with pytest.raises(RequestTimeoutError):
            other.result(0.1)
        client.update_backend_config(f"narrow{suffix}", {"max_concurrent_queries": 2})
    assert other.result(DEADLINE_S) == 1
    deployed.ask("let_go")


def test_a_stream_without_references_is_given_up_even_in_a_cycle(deployed: Deployed) -> None:
    stream = deployed.stream("numbers", 10**9)
    assert next(stream) == 0
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    assert deployed.wait_for_note("closed") == ["left", "closed"]


def test_a_shadow_of_a_stream_ends_with_its_caller(client: serve.Client) -> None:
    for tag in ("original", "shadow"):
        client.create_backend(tag, Streams)
        client.create_endpoint(tag, backend=tag)
    client.shadow_traffic("original", "shadow", 1)
    handle = client.get_handle("original").options(method_name="endless", stream=True)
    told = client.get_handle("shadow").options(method_name="told_by_classic")
    stream = handle.remote()
    assert next(stream) == 0
    while not told.remote().result(DEADLINE_S)[0]:
        pass
    stream.close()
    deadline = time.monotonic() + DEADLINE_S
    while told.remote().result(DEADLINE_S)[1] != ["left", "closed"]:
        assert time.monotonic() < deadline


def test_trouble_of_calls_that_a_generator_makes_is_its_own(everywhere: Deployed) -> None:
    """Unchanged, the error would make the router treat this replica as busy and retry."""
    for method in ["busy", "busy_async", "busy_at_once"]:
        with case(method):
            stream = everywhere.stream(method)
            with pytest.raises(UnavailableError, match="A call made by this replica failed: full") as caught:
                list(stream)
            assert type(caught.value) is UnavailableError
            assert everywhere.ask("told")[0] == 1
            everywhere.ask("reset")


def test_two_cannot_iterate_at_the_same_time(deployed: Deployed) -> None:
    stream = deployed.stream("gated_async")
    assert next(stream) == "first"

    async def scenario() -> None:
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="Two readers iterate"):
            await anext(stream)
        await asyncio.to_thread(deployed.ask, "let_go")
        assert await first == "second"

    in_loop(scenario)


def test_for_is_refused_on_the_loop_that_carries_the_items(client: serve.Client) -> None:
    """On this loop, it would wait for itself."""

    class Relay:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __call__(self, request: Any) -> str:
            try:
                return str(list(self.inner.options(method_name="gated", stream=True).remote()))
            except RuntimeError as error:
                return str(error)

    deployed = Deployed(client, "one-more")
    client.create_backend("for-relay", Relay, deployed.handle, config={"event_loop": "worker"})
    client.create_endpoint("for-relay", backend="for-relay")
    assert "use `async for`" in client.get_handle("for-relay").remote().result(DEADLINE_S)


def test_the_call_is_named_by_its_id(deployed: Deployed) -> None:
    stream = deployed.stream("numbers", 1)
    assert stream.request_id in repr(stream)
    assert list(stream) == [0]
    assert "done" in repr(stream)
