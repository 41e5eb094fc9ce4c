"""The future of one call: everything happens once, even if threads race."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
from tables import each_case

from daskserve.loops.pending_call import PendingCall


class Interrupted(list[Any]):
    """A list that runs another thread's action once, at a given point of a change."""

    def __init__(self, items: list[Any], at: str, other: Callable[[], object]) -> None:
        super().__init__(items)
        self._at = at
        self._other: Callable[[], object] | None = other

    def _let(self, at: str) -> None:
        other = self._other
        if at == self._at and other is not None:
            self._other = None
            other()

    def append(self, item: Any) -> None:
        self._let("before append")
        super().append(item)
        self._let("after append")

    def pop(self, *at: Any) -> Any:
        self._let("before pop")
        item = super().pop(*at)
        self._let("after pop")
        return item

    def remove(self, item: Any) -> None:
        self._let("before remove")
        super().remove(item)
        self._let("after remove")


def test_the_first_end_counts() -> None:
    call: PendingCall[int] = PendingCall()
    assert not call.done()
    assert not call.cancelled()
    with pytest.raises(TimeoutError):
        call.result(0)
    call.set_result(1)
    call.set_error(ValueError())
    assert not call.cancel()
    assert (call.done(), call.cancelled(), call.result(), call.exception()) == (True, False, 1, None)


def test_an_error_and_a_cancellation() -> None:
    failed: PendingCall[int] = PendingCall()
    failed.set_error(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.result()
    cancelled: PendingCall[int] = PendingCall()
    assert cancelled.cancel()
    assert cancelled.cancel()
    cancelled.set_result(1)
    assert cancelled.cancelled()
    with pytest.raises(CancelledError):
        cancelled.result()


def test_callbacks_run_in_order_and_late_ones_at_once() -> None:
    call: PendingCall[int] = PendingCall()
    seen: list[Any] = []
    for number in range(3):
        call.add_done_callback(lambda _, number=number: seen.append(number))  # type: ignore[misc]
    call.set_result(1)
    assert seen == [0, 1, 2]
    call.add_done_callback(seen.append)
    assert seen[3:] == [call]


@each_case("at", ["before append", "after append"])
def test_a_callback_added_during_the_end_is_called_once(at: str) -> None:
    call: PendingCall[int] = PendingCall()
    seen: list[Any] = []
    call._callbacks = Interrupted([], at, lambda: call.set_result(1))
    call.add_done_callback(seen.append)
    assert seen == [call]


@each_case("at", ["before pop", "after pop"])
def test_a_callback_added_while_others_run_is_called_once(at: str) -> None:
    call: PendingCall[int] = PendingCall()
    seen: list[Any] = []
    call._callbacks = Interrupted([seen.append], at, lambda: call.add_done_callback(seen.append))
    call.set_result(1)
    assert seen == [call] * 2


def test_a_callback_claimed_by_both_threads_is_called_once() -> None:
    """The adding thread sees the end and the ending thread sees the callback; both claim it."""
    call: PendingCall[int] = PendingCall()
    seen: list[Any] = []

    def end() -> None:
        call._callbacks = Interrupted(call._callbacks, "before pop", take_back)
        call.set_result(1)

    def take_back() -> None:
        call._callbacks.remove(seen.append)
        seen.append(call)

    call._callbacks.append(seen.append)
    end()
    assert seen == [call]


@each_case("ends_as", ["cancelled", "answered"])
def test_stop_is_called_only_on_cancellation(ends_as: str) -> None:
    for is_late in (False, True):
        call: PendingCall[int] = PendingCall()
        stopped: list[int] = []
        end = call.cancel if ends_as == "cancelled" else lambda call=call: call.set_result(1)
        if is_late:
            end()
        call.on_cancel(lambda stopped=stopped: stopped.append(1))  # type: ignore[misc]
        if not is_late:
            end()
        assert stopped == [1] * (ends_as == "cancelled")
        assert call._stop is None


def test_stop_is_called_once_when_both_threads_claim_it() -> None:
    call: PendingCall[int] = PendingCall()
    stopped: list[int] = []
    call.on_cancel(lambda: stopped.append(1))
    assert call._stop is not None

    def other_side() -> None:
        taken.clear()
        stopped.append(2)

    call._stop = taken = Interrupted(call._stop, "before pop", other_side)
    call.cancel()
    assert stopped == [2]


@each_case(("at", "first"), [("before append", 2), ("after append", 1)])
def test_the_first_of_two_concurrent_ends_counts(at: str, first: int) -> None:
    call: PendingCall[int] = PendingCall()
    seen: list[Any] = []
    call.add_done_callback(seen.append)
    call._ends = Interrupted(call._ends, at, lambda: call.set_result(2))
    call.set_result(1)
    assert (call.result(), seen) == (first, [call])
    assert len(call._ends) == 1


@each_case("at", ["before append", "after append"])
def test_concurrent_cancels_both_return_true(at: str) -> None:
    call: PendingCall[int] = PendingCall()
    results: list[bool] = []
    call._ends = Interrupted(call._ends, at, lambda: results.append(call.cancel()))
    results.append(call.cancel())
    assert results == [True, True]


def test_a_blocked_thread_is_woken() -> None:
    call: PendingCall[str] = PendingCall()
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(call.result(10)))
    waiting.start()
    call.set_result("there")
    waiting.join(10)
    assert found == ["there"]


def test_among_many_threads_one_ends_the_call_and_each_callback_runs_once() -> None:
    for _ in range(200):
        call: PendingCall[int] = PendingCall()
        begin = threading.Barrier(6)
        ended: list[bool] = []
        called: list[int] = []

        def end(call: PendingCall[int] = call, begin: Any = begin, ended: list[bool] = ended) -> None:
            begin.wait(10)
            ended.append(call._end(1, None))

        def add(
            number: int, call: PendingCall[int] = call, begin: Any = begin, called: list[int] = called
        ) -> None:
            begin.wait(10)
            call.add_done_callback(lambda _: called.append(number))

        threads = [threading.Thread(target=end) for _ in range(3)]
        threads += [threading.Thread(target=add, args=(number,)) for number in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(10)
        assert (ended.count(True), sorted(called)) == (1, [0, 1, 2])


@each_case("timeout_s", [float("inf"), 1e300, threading.TIMEOUT_MAX * 2])
def test_a_wait_may_be_longer_than_a_lock_allows(timeout_s: float) -> None:
    call: PendingCall[str] = PendingCall()
    ending = threading.Timer(0.01, call.set_result, ["done"])
    ending.start()
    assert call.wait(timeout_s)
    ending.join()


def test_a_timeout_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match="timeout_s must be a number of seconds, or None; got '3'"):
        PendingCall[str]().wait("3")  # type: ignore[arg-type]
