"""SIGTERM: the registered shutdowns begin first, then the previous handler ends the process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from daskserve.loops.termination import Termination, begin_on, on_sigterm


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Yield the recorded signals that would have ended this process."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


class Begun:
    """Records the shutdowns that have begun; a test completes them."""

    def __init__(self) -> None:
        self.dones: list[Callable[[], None]] = []

    def __call__(self, done: Callable[[], None]) -> None:
        self.dones.append(done)


def test_the_process_ends_when_all_that_was_begun_is_done(ended: list[int]) -> None:
    one, other = Begun(), Begun()
    on_sigterm(one)
    on_sigterm(other)
    sigterm()
    assert (len(one.dones), len(other.dones), ended) == (1, 1, [])
    one.dones[0]()
    assert ended == []
    threading.Thread(target=other.dones[0]).run()
    assert ended == [signal.SIGTERM]
    sigterm()  # the previous handler is restored
    assert ended == [signal.SIGTERM] * 2


def test_a_second_signal_ends_the_process_at_once(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.2, 10.4])
    monkeypatch.setattr(Termination, "now", lambda self: next(times))
    begun = Begun()
    on_sigterm(begun)
    sigterm()
    sigterm()  # sent to the process and to its group
    assert (len(begun.dones), ended) == (1, [])
    sigterm()
    assert (len(begun.dones), ended) == (1, [signal.SIGTERM])
    begun.dones[0]()
    assert ended == [signal.SIGTERM]


def test_nothing_is_left_once_all_handlers_are_removed(ended: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one, other = Begun(), Begun()
    remove_one, remove_other = on_sigterm(one), on_sigterm(other)
    remove_one()
    sigterm()
    assert (one.dones, len(other.dones)) == ([], 1)
    remove_other()  # what has begun is not undone
    assert ended == []
    other.dones[0]()
    assert ended == [signal.SIGTERM]
    remove = on_sigterm(one)
    remove()
    remove()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_handler_that_was_put_in_front_is_kept_and_calls_on(ended: list[int], is_removed: bool) -> None:
    begun = Begun()
    remove = on_sigterm(begun)
    behind: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: behind(number, frame))
    if is_removed:
        remove()
        assert signal.getsignal(signal.SIGTERM) is not behind
    sigterm()
    for done in begun.dones:
        done()
    assert (len(begun.dones), ended) == (0 if is_removed else 1, [signal.SIGTERM])


def test_no_signal_is_sent_if_another_handler_was_installed(ended: list[int]) -> None:
    """Dask restores the default handler when its program ends; a signal would then change the exit status."""
    begun = Begun()
    on_sigterm(begun)
    sigterm()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    begun.dones[0]()
    assert ended == []


def test_an_ignored_sigterm_stays_ignored(ended: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    remove = on_sigterm(Begun())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_other_threads_change_nothing(ended: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    removes: list[Callable[[], None]] = []
    thread = threading.Thread(target=lambda: removes.append(on_sigterm(Begun())))
    thread.start()
    thread.join()
    removes[0]()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_child_ends_by_the_signal(ended: list[int]) -> None:
    """Dask's own handler, which the child inherits too, would ignore it."""
    begun = Begun()
    on_sigterm(begun)
    fork = multiprocessing.get_context("fork")
    for _ in range(5):
        child = fork.Process(target=threading.Event().wait, daemon=True)
        child.start()
        try:
            os.kill(child.pid or 0, signal.SIGTERM)  # most of them are still in the fork
            child.join(10)
            assert child.exitcode == -signal.SIGTERM
        finally:
            child.kill()
    assert (begun.dones, ended) == ([], [])
    sigterm()
    assert len(begun.dones) == 1  # nothing is held back in this process


async def test_a_handler_on_an_event_loop_ends_with_its_task(ended: list[int]) -> None:
    may_end = asyncio.Event()
    remove = on_sigterm(begin_on(asyncio.get_running_loop(), lambda: asyncio.ensure_future(may_end.wait())))
    sigterm()
    await asyncio.sleep(0)
    assert ended == []
    may_end.set()
    async with asyncio.timeout(5):
        while not ended:  # noqa: ASYNC110 - a signal has no event
            await asyncio.sleep(0)
    remove()


def test_a_closed_event_loop_has_nothing_to_do(ended: list[int]) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    on_sigterm(begin_on(loop, loop.create_future))
    sigterm()
    assert ended == [signal.SIGTERM]
