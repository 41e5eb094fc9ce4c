"""A worker between SIGTERM and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.protocols.retirement import RetirementStatus
from daskserve.cluster.worker import retirement
from daskserve.cluster.worker.retirement import ANSWER_S, COMPLETE_S, EXIT_SHARE, NEWS_S, Retirement
from daskserve.common.clock import LoopClock

pytestmark = pytest.mark.virtual_time


class Bench:
    """A worker that retires within 30 s, and a scheduler with given answers, each after a second."""

    def __init__(self, *answers: Any, grace_s: float = 30.0, departs: bool = True) -> None:
        self.answers = list(answers)
        self.departs = departs
        self.drained: list[tuple[float, float]] = []
        self.entries: dict[str, object] = {"replica": object()}
        self.asked: list[dict[str, Any]] = []
        scheduler = SimpleNamespace(daskserve=self._answer)
        worker: Any = SimpleNamespace(address="w1", scheduler=scheduler, nanny=None)
        registry: Any = SimpleNamespace(drain=self._drain, entries=self.entries)
        self.retirement = Retirement(worker, registry, LoopClock(), grace_s)

    async def _answer(self, *, verb: str, message: dict[str, Any], **versions: Any) -> Any:
        self.asked.append({"verb": verb, **message})
        if verb == "depart":
            if not self.departs:
                raise OSError("the scheduler is gone")
            return {"value": None}
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "hangs":
            await asyncio.sleep(1000)
        await asyncio.sleep(1)
        if isinstance(answer, Exception):
            raise answer
        return {"value": answer} if answer is not None else None

    async def _drain(self, grace_s: float) -> None:
        self.drained.append((asyncio.get_running_loop().time(), grace_s))
        await asyncio.sleep(2)

    async def retire(self) -> float:
        await self.retirement.begin()
        return asyncio.get_running_loop().time()


async def test_it_ends_when_the_scheduler_has_moved_everything() -> None:
    bench = Bench(RetirementStatus.MOVING, RetirementStatus.MOVING, RetirementStatus.MOVED)
    assert await bench.retire() == 3
    assert bench.drained == []
    assert bench.asked[0] == {"verb": "leave", "worker": "w1", "within_s": 28.0}


@pytest.mark.parametrize(
    ("answer", "after_s"),
    [(RetirementStatus.STAYED, 1), (OSError("it is gone"), 1), (None, 1), ("hangs", ANSWER_S)],
)
async def test_its_requests_complete_here_if_the_scheduler_moves_nothing(answer: Any, after_s: float) -> None:
    bench = Bench(answer)
    assert await bench.retire() == after_s + 2 + NEWS_S / 2
    assert bench.drained == [(after_s, 28 - NEWS_S - after_s)]
    # All processes that send requests are notified before this worker ends.
    assert bench.asked[-1] == {"verb": "depart", "worker": "w1"}


async def test_without_a_scheduler_it_refuses_requests_before_it_ends() -> None:
    """Routers send nothing to a replica that has refused a request, so none is under way at the end."""
    bench = Bench(OSError("it is gone"), departs=False)
    assert await bench.retire() == 1 + 2 + NEWS_S / 2


async def test_a_worker_that_the_scheduler_has_removed_completes_its_requests_and_then_refuses_others() -> (
    None
):
    bench = Bench(None)
    await bench.retirement.complete()
    assert bench.drained == [(0, COMPLETE_S)]
    assert bench.asked == [{"verb": "depart", "worker": "w1"}]
    assert asyncio.get_running_loop().time() == 2 + NEWS_S / 2
    bench.entries.clear()  # the usual case: the scheduler has moved everything
    await bench.retirement.complete()
    assert len(bench.drained) == len(bench.asked) == 1


@pytest.mark.parametrize(("grace_s", "ends_s"), [(30.0, 28.0), (5.0, 5 * (1 - EXIT_SHARE))])
async def test_dask_has_the_rest_of_the_time_for_its_end(grace_s: float, ends_s: float) -> None:
    bench = Bench(RetirementStatus.MOVING, grace_s=grace_s)
    await bench.retire()
    assert bench.drained == [(pytest.approx(ends_s), 0.0)]


async def test_a_worker_and_its_nanny_that_both_get_sigterm_retire_the_worker_once() -> None:
    bench = Bench(RetirementStatus.MOVED)
    await asyncio.gather(bench.retirement.begin(), bench.retirement.begin())
    assert len(bench.asked) == 1


async def test_a_worker_that_is_closed_leaves_the_signal_to_dask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering: list[object] = []

    def on_sigterm(answer: object) -> Callable[[], None]:
        answering.append(answer)
        return answering.clear

    async def watch_nanny(*_: object) -> None:
        pass

    monkeypatch.setattr(retirement, "on_sigterm", on_sigterm)
    monkeypatch.setattr(retirement, "watch_nanny", watch_nanny)
    bench = Bench(RetirementStatus.MOVED)
    await bench.retirement.open(has_process=True)
    await bench.retirement.open(has_process=True)
    assert len(answering) == 1
    bench.retirement.close()
    assert answering == []
    bench.retirement.close()
