"""SIGTERM to a nanny, whose process does not run daskserve."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.worker.nannies import answer_in_nanny, retire_in_worker, watch_nanny


class Process:
    """The other process, as a Dask server sees it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.addresses: list[str] = []
        self._run = run

    def rpc(self, address: str) -> Any:
        self.addresses.append(address)
        return SimpleNamespace(run=self._answer)

    async def _answer(self, *, function: bytes, args: bytes, wait: bool) -> dict[str, Any]:
        assert wait
        try:
            return {"status": "OK", "result": await self._run(pickle.loads(function), *pickle.loads(args))}
        except ValueError as error:
            return {"status": "error", "exception": error}


class Nanny(Process):
    worker_address = "tcp://worker"

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(run)
        self.status = SimpleNamespace(name="running")
        self.reasons: list[str] = []

    def close_gracefully(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setitem(sys.modules, "distributed.cli.dask_worker", ModuleType("dask_worker"))
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a signal has no event
            await asyncio.sleep(0.001)


async def test_a_nanny_waits_until_its_worker_has_retired_and_then_ends_as_dask_wants(
    ended: list[int],
) -> None:
    may_end = asyncio.Event()
    asked: list[Any] = []

    async def run(function: Any) -> None:
        asked.append(function)
        await may_end.wait()

    nanny: Any = Nanny(run)
    answer_in_nanny(30.0, nanny)
    answer_in_nanny(30.0, nanny)  # the next worker of this nanny
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: asked)
    assert (asked, nanny.addresses, ended) == ([retire_in_worker], ["tcp://worker"], [])
    # Otherwise the end of the worker's process, which may have got SIGTERM as well, would start another.
    assert nanny.reasons == ["daskserve-sigterm"]
    may_end.set()
    await until(lambda: ended)
    assert (len(asked), ended) == (1, [signal.SIGTERM])


async def _fail(function: Any) -> None:
    raise ValueError("no module named daskserve")


async def _lose(function: Any) -> None:
    raise OSError("the worker's process has ended")


async def _hang(function: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("run", [_fail, _lose, _hang])
async def test_a_worker_that_does_not_answer_is_ended_too(ended: list[int], run: Any) -> None:
    answer_in_nanny(0.05, Nanny(run))  # type: ignore[arg-type]
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: ended)


async def test_a_nanny_without_a_worker_ends_at_once(ended: list[int]) -> None:
    nanny: Any = Nanny(_hang)
    nanny.status.name = "closing"
    answer_in_nanny(30.0, nanny)
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: ended)
    assert nanny.reasons == nanny.addresses == []


async def test_sigterm_is_left_alone_in_a_users_program_that_has_nannies(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("distributed.cli.dask_worker", "distributed.cli.dask_spec"):
        monkeypatch.delitem(sys.modules, each, raising=False)
    answer_in_nanny(30.0, Nanny(_hang))  # type: ignore[arg-type]
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


async def test_a_worker_sends_its_nanny_the_time_that_it_may_wait() -> None:
    received: list[Any] = []

    async def run(*call: Any) -> None:
        received.append(call)

    worker: Any = Process(run)
    worker.nanny = "tcp://nanny"
    await watch_nanny(worker, 12.0)
    assert (worker.addresses, received) == (["tcp://nanny"], [(answer_in_nanny, 12.0)])
    worker.nanny = None
    await watch_nanny(worker, 12.0)
    assert len(received) == 1


def test_a_nanny_that_cannot_be_notified_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def run(*call: Any) -> None:
            raise ValueError("no module named daskserve")

        worker: Any = Process(run)
        worker.nanny = "tcp://nanny"
        await watch_nanny(worker, 12.0)

    asyncio.run(main())
    assert "SIGTERM to the nanny of this worker will abort running requests: ValueError" in caplog.text


def test_a_worker_without_daskserve_may_end_at_once() -> None:
    asyncio.run(retire_in_worker(SimpleNamespace()))  # type: ignore[arg-type]
