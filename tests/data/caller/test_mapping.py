"""Maps: many calls of a handle with a bounded number in flight."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from quick_instance import poll_for
from tables import each_case

import daskserve as serve
from daskserve.data.caller.mapping.backlogs import backlogs
from daskserve.data.caller.mapping.rules import MAX_LOSSES, Attempts, Retry, Rules
from daskserve.data.caller.mapping.target import room_of
from daskserve.data.caller.mapping.window import Item, Window
from daskserve.data.caller.pool.pooled_replica import BATCH_REFUSAL_S
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    BadRequestError,
    NotFoundError,
    StreamOptionError,
    UnavailableError,
)
from daskserve.testing import local_instance


class ScriptedCall:
    """A call that the test ends."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.error: BaseException | None = None
        self.is_cancelled = False
        self._notes: list[Callable[[Any], object]] = []

    def follow(self, note: Callable[[Any], object]) -> None:
        self._notes.append(note)

    def fetch_rest(self) -> bool:
        return False

    def failure(self) -> BaseException | None:
        return self.error

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self._notes.pop()(None)


class Calls(list[ScriptedCall]):
    """The calls of a window, in the order in which they start."""

    def send(self, item: Item) -> ScriptedCall:
        self.append(ScriptedCall(item))
        return self[-1]

    def indices(self) -> list[int]:
        return [each.item.index for each in self]


def window_of(calls: Calls, count: int, *, ordered: bool = True, retries: int = 0) -> Window:
    window = Window("e", calls.send, Rules(retries), ordered=ordered)
    for number in range(count):
        window.add(number)
    return window


def taken(window: Window) -> list[int]:
    found = []
    while (item := window.take()) is not None:
        found.append(item.index)
    return found


def test_results_come_in_order_or_as_they_end() -> None:
    for ordered, expected in ((True, [[], [0, 1]]), (False, [[1], [0]])):
        calls = Calls()
        window = window_of(calls, 2, ordered=ordered)
        calls[1].end()
        window.advance(0.0)
        first = taken(window)
        calls[0].end()
        window.advance(0.0)
        assert [first, taken(window)] == expected
        assert window.is_empty


def test_results_that_wait_for_an_earlier_one_are_bounded() -> None:
    calls = Calls()
    window = window_of(calls, 2)
    assert not window.may_add(2)
    started = 2
    while True:
        for call in calls[1:]:
            if not call.item.has_ended and call._notes:
                call.end()
        window.advance(0.0)
        if not window.may_add(2):
            break
        window.add(started)
        started += 1
    assert started == 4


def test_lost_items_are_called_again_and_suspects_one_at_a_time() -> None:
    calls = Calls()
    window = window_of(calls, 3)
    lost = ActorLostError("gone")
    for call in list(calls):
        call.end(lost)
    window.advance(0.0)
    assert window.next_at() == 0.1
    window.advance(1.0)
    assert calls.indices() == [0, 1, 2, 0, 1, 2]
    for call in calls[3:]:
        call.end(lost)
    window.advance(1.0)
    assert calls.indices()[6:] == [0]  # each of these items may be the cause
    calls[6].end()
    window.advance(1.0)
    assert calls.indices()[6:] == [0, 1]
    for number in range(7, 7 + MAX_LOSSES - 2):
        calls[number].end(lost)
        window.advance(1.0)
    assert taken(window) == [0]
    # Item 1 is queued behind the other suspects.
    assert set(calls.indices()[7:]) == {1, 2}


@each_case(
    ("error", "expected"),
    (
        (BackPressureError(retry_after_s=3.0), Retry(3.0)),
        (ActorLostError(begun=False), Retry(0.05)),
        (ActorLostError(is_planned=True), Retry(0.05)),
        (UnavailableError(), Retry(0.1)),
        (ValueError(), Retry(0.0)),
        (BadRequestError(), None),
        (NotFoundError(), None),
    ),
)
def test_rules_decide_what_follows_a_failure(error: Exception, expected: Retry | None) -> None:
    assert Rules(retries=1).after(error, Attempts()) == expected


def test_an_item_that_ends_its_replicas_fails_for_good() -> None:
    attempts = Attempts()
    found = [Rules().after(ActorLostError(), attempts) for _ in range(MAX_LOSSES)]
    assert [None if each is None else each.is_suspect for each in found] == [False, True, True, None]
    assert Rules().after(BackPressureError(), attempts) is not None


def test_the_items_that_wait_count_for_their_backends() -> None:
    calls = Calls()
    first, second, paused = window_of(calls, 1), window_of(calls, 1), window_of(calls, 1)
    first.backlog, second.backlog, paused.backlog = 5, 2, 9
    calls[2].end()  # its result is not read
    assert backlogs([first, second, paused], lambda _: ["a", "b"]) == {"a": 4, "b": 4}
    assert backlogs([first], lambda _: []) == {}


def test_a_job_sends_what_the_replicas_take_and_one_more_for_each() -> None:
    pool = ReplicaPool(lambda address: False)
    pool.update({"a": ("tcp://1", 1), "b": ("tcp://2", 1)}, 4, str)
    routers: Any = SimpleNamespace(
        router=lambda endpoint: SimpleNamespace(backends=["model"]),
        replica_set=lambda tag: SimpleNamespace(pool=pool),
    )
    assert room_of(None, "e", 0.0) == (0, 0)
    assert room_of(routers, "e", 0.0) == (2, 8)
    pool.note_busy(pool.entries()["a"], 1, 5.0, was_queued=False, priority=-50)  # although it has four slots
    assert room_of(routers, "e", 6.0) == (2, 6)
    assert room_of(routers, "e", 5.0 + BATCH_REFUSAL_S) == (2, 8)


# ---- with an instance


def double(value: int) -> int:
    if value < 0:
        raise ValueError(f"{value} is negative")
    return 2 * value


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        client.deploy("double", double, route_prefix=None)
        yield client


def test_a_map_is_lazy_and_bounded(client: serve.Client) -> None:
    pulled = []

    def items() -> Iterator[int]:
        for number in range(10**9):
            pulled.append(number)
            yield number

    results = client.get_handle("double").map(items(), max_in_flight=4)
    assert pulled == []
    assert [next(results) for _ in range(20)] == list(range(0, 40, 2))
    assert len(pulled) <= 20 + 8
    with pytest.raises(BadRequestError, match="pass on a list"):
        results.__reduce__()
    results.close()
    assert list(results) == []


def test_errors_are_raised_kept_or_skipped(client: serve.Client) -> None:
    handle = client.get_handle("double")
    items = [1, -2, 3]
    results = handle.map(items)
    assert next(results) == 2
    with pytest.raises(ValueError, match="-2 is negative") as caught:
        next(results)
    assert caught.value.item_index == 1  # type: ignore[attr-defined]
    assert "Item 1" in caught.value.__notes__[0]
    assert list(results) == []
    first, error, last = handle.map(items, errors="return")
    assert (first, str(error), last) == (2, "-2 is negative", 6)
    assert sorted(handle.map(items, errors="skip", ordered=False)) == [2, 6]
    unsendable = list(handle.map([threading.Lock(), 4], errors="return"))
    assert (type(unsendable[0]).__name__, unsendable[1]) == ("UnpicklableError", 8)


def test_an_error_that_all_items_would_get_is_raised(client: serve.Client) -> None:
    client.deploy("gone", double, route_prefix=None)
    handle = client.get_handle("gone")
    client.delete_endpoint("gone")
    with pytest.raises((NotFoundError, UnavailableError)):
        list(handle.map(range(100), errors="skip"))


def test_an_interrupted_reader_leaves_no_call_behind(client: serve.Client) -> None:
    def items() -> Iterator[int]:
        yield from range(4)
        raise KeyboardInterrupt

    results = client.get_handle("double").map(items(), max_in_flight=10)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert list(results) == []


def test_an_error_of_the_source_comes_after_the_results_before_it(client: serve.Client) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("source")

    results = client.get_handle("double").map(items())
    assert next(results) == 2
    with pytest.raises(KeyError, match="source"):
        next(results)


def test_a_map_on_an_event_loop(client: serve.Client) -> None:
    handle = client.get_handle("double")

    async def arriving() -> AsyncIterator[int]:
        for number in range(20):
            await asyncio.sleep(0)
            yield number

    async def main() -> list[list[int]]:
        begun: list[int] = []
        with pytest.raises(RuntimeError, match="async for"):  # raised before any call is sent
            next(handle.map(begun.append(each) for each in [1]))
        assert begun == []
        return [[each async for each in handle.map(source)] for source in (range(20), arriving())]

    expected = list(range(0, 40, 2))
    assert asyncio.run(main()) == [expected, expected]
    with pytest.raises(TypeError, match="async for"):
        iter(handle.map(arriving()))


@each_case(
    ("options", "message"),
    (
        ({"max_in_flight": 0}, "max_in_flight must be"),
        ({"retries": -1}, "retries must be"),
        ({"errors": "ignore"}, "errors must be"),
    ),
)
def test_wrong_options_are_refused(client: serve.Client, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        client.get_handle("double").map([1], **options)


def test_invalid_arguments_of_map_are_refused(client: serve.Client) -> None:
    handle = client.get_handle("double")
    with pytest.raises(BadRequestError, match="needs an iterable of items; got 5"):
        handle.map(5)  # type: ignore[arg-type]
    with pytest.raises(StreamOptionError):
        handle.options(stream=True).map([1])


class Flaky:
    """Fails twice for each item."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, value: int) -> tuple[int, int | str, str, int]:
        request = serve.context.get_request_context()
        self.seen.append(request.item_id)
        tries = self.seen.count(request.item_id)
        if tries < 3:
            raise OSError("try again")
        return value, request.priority, request.item_id.rpartition("/")[2], tries


def test_retries_and_the_id_of_an_item() -> None:
    with local_instance() as client:
        client.deploy("flaky", Flaky, route_prefix=None)
        handle = client.get_handle("flaky")
        assert list(handle.map([7, 8], retries=2)) == [(7, -50, "0", 3), (8, -50, "1", 3)]
        assert list(handle.options(priority=5).map([9], retries=2)) == [(9, 5, "0", 3)]


class Slow:
    """Never answers; counts the calls that were cancelled."""

    def __init__(self) -> None:
        self.counts = {"begun": 0, "cancelled": 0}

    async def __call__(self, value: int) -> None:
        self.counts["begun"] += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise

    async def count(self, name: str) -> int:
        return self.counts[name]


def test_results_that_are_dropped_cancel_their_calls() -> None:
    with local_instance() as client:
        client.deploy("slow", Slow, route_prefix=None)
        handle = client.get_handle("slow")
        counting = handle.options(method_name="count")

        def wait_for(name: str) -> None:
            poll_for(lambda: counting.remote(name).result() == 3, what=lambda: f"not all are {name}")

        results = handle.map(range(100), max_in_flight=3)
        results._fill()
        wait_for("begun")
        del results
        gc.collect()
        wait_for("cancelled")
