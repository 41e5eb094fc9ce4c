"""Custom autoscaling metrics: when they are read, which values are valid, and that they delay no request."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from gates import Gates, anew_for_each_test
from replica_harness import make, our_threads
from tables import case

from daskserve.common.clock import LoopClock
from daskserve.data.replica.replica import Replica
from daskserve.data.replica.user_code import autoscaling_stats
from daskserve.data.replica.user_code.autoscaling_stats import KEPT_S, MOST_VALUES, ChildStats, checked
from daskserve.data.replica.user_code.recorded_stats import checked_plain
from daskserve.testing import wait_until

DEADLINE_S = 10.0


class SharedGates(Gates):
    """Values and events that user code and the test share."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.threads: set[str] = set()
        self.answer: Any = {"tokens": 3}


GATES = SharedGates()
_fresh_gates = anew_for_each_test(GATES)


class ShiftedClock(LoopClock):
    """The time of the loop, plus an offset that the test sets."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


CLOCK = ShiftedClock()


def run(scenario: Callable[[Replica], Awaitable[None]], definition: Any, **options: Any) -> None:
    replica = make(definition, concurrency=1, clock=CLOCK, **options)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await replica.start()
            try:
                await scenario(replica)
            finally:
                GATES.go.set()
                await replica.stop(DEADLINE_S)

    CLOCK.ahead_s = 0.0
    asyncio.run(main())
    assert our_threads() == []


def reported(replica: Replica) -> dict[str, float] | None:
    found: dict[str, float] | None = replica.metrics().get("custom")
    return found


async def at_rest(replica: Replica) -> None:
    """Return once the latest call has ended."""
    recorder = replica._code._stats  # type: ignore[attr-defined]
    await wait_until(lambda: recorder._run is None)


class Base:
    def __call__(self, request: Any = None) -> str:
        return threading.current_thread().name


class Plain(Base):
    def record_autoscaling_stats(self) -> Any:
        GATES.calls += 1
        GATES.threads.add(threading.current_thread().name)
        if GATES.answer is SystemExit:
            sys.exit("enough")
        if isinstance(GATES.answer, Exception):
            raise KeyError(*GATES.answer.args)  # a new one, because a traceback would keep this object
        return GATES.answer


class Async(Plain):
    async def __call__(self, request: Any = None) -> str:
        return "done"

    async def record_autoscaling_stats(self) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().record_autoscaling_stats()


class Mixed(Async):
    __call__ = Base.__call__  # type: ignore[assignment]


class Static(Base):
    @staticmethod
    async def record_autoscaling_stats() -> Any:
        return Plain.record_autoscaling_stats(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("definition", [Plain, Async, Mixed, Static])
@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_values_come_from_where_user_code_runs(definition: Any, event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        assert reported(replica) is None
        await wait_until(lambda: reported(replica) == {"tokens": 3.0})
        GATES.answer = {"tokens": 4, "age": 0.5}
        await wait_until(lambda: reported(replica) == {"tokens": 4.0, "age": 0.5})
        on_worker = event_loop == "worker" and definition is not Plain
        assert (threading.main_thread().name in GATES.threads) is on_worker

    run(scenario, definition, event_loop=event_loop)


def plain_function(request: Any = None) -> str:
    return "done"


class Forwarding(Base):
    """Returns any attribute by ``__getattr__``, without defining it."""

    def __getattr__(self, name: str) -> Any:
        GATES.calls += 1
        raise AttributeError(name) if name.startswith("__") or name == "check_health" else RuntimeError


@pytest.mark.parametrize("definition", [Base, plain_function, Forwarding])
def test_code_without_the_method_is_not_called(definition: Any) -> None:
    async def scenario(replica: Replica) -> None:
        before = GATES.calls
        for _ in range(3):
            assert set(replica.metrics()) == {"ongoing", "queued", "ended", "failed", "latency_counts"}
            await asyncio.sleep(0.001)
        assert GATES.calls == before
        assert len(replica._code._executor.background) == 0  # type: ignore[attr-defined]

    run(scenario, definition)


def test_a_coroutine_is_no_result_and_is_closed() -> None:
    async def stats() -> dict[str, float]:
        return {}

    answer = stats()
    assert checked_plain(answer) == ({}, "returned coroutine; return a dict with texts as keys")
    assert inspect.getcoroutinestate(answer) == inspect.CORO_CLOSED


def test_nothing_is_called_without_a_reader() -> None:
    async def scenario(replica: Replica) -> None:
        await replica.statistics()
        replica.samples()
        await asyncio.sleep(0.02)
        assert GATES.calls == 0

    run(scenario, Plain)


def test_expired_values_are_not_reported() -> None:
    async def scenario(replica: Replica) -> None:
        await wait_until(lambda: reported(replica) is not None)
        await at_rest(replica)
        CLOCK.ahead_s += KEPT_S + 1
        assert reported(replica) is None
        await wait_until(lambda: reported(replica) == {"tokens": 3.0})

    run(scenario, Plain)


class HangingPlain(Base):
    def record_autoscaling_stats(self) -> dict[str, float]:
        GATES.calls += 1
        if GATES.calls > 1 and not GATES.go.is_set():
            GATES.go.wait()
        return {"tokens": GATES.calls}


class HangingAsync(HangingPlain):
    async def record_autoscaling_stats(self) -> dict[str, float]:  # type: ignore[override]
        GATES.calls += 1
        if GATES.calls > 1 and not GATES.go.is_set():
            await asyncio.sleep(1000)
        return {"tokens": GATES.calls}


@pytest.mark.parametrize("definition", [HangingPlain, HangingAsync])
def test_one_that_hangs_is_logged_once_and_holds_up_nothing(
    definition: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(replica: Replica) -> None:
        await wait_until(lambda: reported(replica) is not None and GATES.calls == 2)
        for _ in range(3):
            CLOCK.ahead_s += 2.1
            replica.metrics()
            await asyncio.sleep(0.01)
        assert reported(replica) is None
        # The only slot is free, and no call counts as abandoned.
        await replica.probe()
        statistics = await replica.statistics()
        assert (statistics["abandoned"], statistics["ongoing"]) == (0, 0)
        if definition is HangingPlain:
            assert GATES.calls == 2  # never two calls at a time
        GATES.go.set()
        found = await wait_until(lambda: reported(replica))
        if definition is HangingPlain:
            assert found == {"tokens": 3.0}  # late results are ignored

    with caplog.at_level(logging.ERROR, "daskserve.replica"):
        run(scenario, definition)
    said = [each.getMessage() for each in caplog.records if "record_autoscaling_stats" in each.getMessage()]
    assert len(said) == 1
    assert "b#AAAAAA has not returned within 2 s; its values are ignored" in said[0]


class Broken(Plain):
    """Finally, even looking up its method fails."""

    def __getattribute__(self, name: str) -> Any:
        if name == "record_autoscaling_stats" and GATES.answer == "broken":
            raise LookupError("not for you")
        return super().__getattribute__(name)


def test_one_that_cannot_be_had_is_the_users_trouble(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(replica: Replica) -> None:
        GATES.answer = "broken"
        await wait_until(lambda: (reported(replica), caplog.records)[1])
        assert reported(replica) is None

    with caplog.at_level(logging.ERROR, "daskserve.replica"):
        run(scenario, Broken)
    assert ["LookupError: not for you" in each.getMessage() for each in caplog.records] == [True]


class Deleted(Plain):
    def __init__(self) -> None:
        GATES.deleted = weakref.finalize(self, lambda: None)  # type: ignore[attr-defined]


def test_one_that_raises_is_logged_once_and_its_values_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(replica: Replica) -> None:
        await wait_until(lambda: reported(replica) is not None)
        GATES.answer = KeyError("no tokens")
        for _ in range(2):
            await at_rest(replica)
            replica.metrics()
        await at_rest(replica)
        assert reported(replica) is None
        before = GATES.calls
        await wait_until(lambda: (reported(replica), GATES.calls > before + 3)[1])
        GATES.answer = {"tokens": 1}
        await wait_until(lambda: reported(replica) == {"tokens": 1.0})
        GATES.answer = KeyError("again")
        await wait_until(lambda: reported(replica) is None)

    with caplog.at_level(logging.ERROR, "daskserve.replica"):
        run(scenario, Deleted)
    (record,) = caplog.records
    assert "raised KeyError: 'no tokens'; its values are ignored" in record.getMessage()
    assert "in record_autoscaling_stats" in record.getMessage()
    assert not GATES.deleted.alive  # type: ignore[attr-defined]


@pytest.mark.parametrize("definition", [Plain, Async])
def test_one_that_wants_to_end_its_thread_ends_nothing(
    definition: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(replica: Replica) -> None:
        await wait_until(lambda: reported(replica) is not None)
        GATES.answer = SystemExit
        await wait_until(lambda: reported(replica) is None)
        GATES.answer = {"tokens": 1}
        await wait_until(lambda: reported(replica) == {"tokens": 1.0})

    with caplog.at_level(logging.ERROR, "daskserve.replica"):
        run(scenario, definition)
    assert ["SystemExit: enough" in each.getMessage() for each in caplog.records] == [True]


def test_a_replica_stops_though_its_method_hangs(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(replica: Replica) -> None:
        await wait_until(lambda: reported(replica) is not None and GATES.calls == 2)

    with caplog.at_level(logging.WARNING, "daskserve.replica"):
        run(scenario, HangingPlain)
    assert caplog.records == []


# ---- what is gone by


def test_every_kind_of_number_is_a_value() -> None:
    for value in [1, 2.5, -3, np.float32(0.5), np.int64(7), Fraction(1, 2)]:
        with case(value):
            values, wrong = checked({"x": value})
            assert (values, wrong) == ({"x": float(value)}, "")
            assert type(values["x"]) is float


def test_values_that_are_not_finite_are_dropped_and_the_rest_kept() -> None:
    for value in [float("nan"), float("inf"), 10**400, True, np.True_, "3", None, 1j, [1], np.ones(2)]:
        with case(value):
            values, wrong = checked({"x": value, "y": 1})
            assert values == {"y": 1.0}
            assert "for 'x'; a value must be a finite number" in wrong
            assert len(wrong) < 300


def test_invalid_names_are_dropped_and_the_rest_kept() -> None:
    for name in ["", "x" * 101, "a\nb", "\ud800", 7, None]:
        with case(name):
            values, wrong = checked({name: 1, "y": 1})
            assert values == {"y": 1.0}
            assert "printable characters" in wrong


def test_too_many_values_are_none() -> None:
    assert len(checked({f"x{n}": n for n in range(MOST_VALUES)})[0]) == MOST_VALUES
    values, wrong = checked({f"x{n}": n for n in range(MOST_VALUES + 1)})
    assert values == {}
    assert "33 values; 32 are allowed" in wrong


async def coroutine() -> dict[str, float]:
    return {}


def test_a_value_that_is_not_a_dict_counts_as_empty() -> None:
    for answer in (None, 3, [("x", 1)], coroutine()):
        assert checked(answer) == ({}, f"returned {type(answer).__name__}; return a dict of numbers by name")


def test_trouble_with_an_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(replica: Replica) -> None:
        GATES.answer = {"tokens": float("nan"), "age": 2}
        await wait_until(lambda: reported(replica) == {"age": 2.0})
        before = GATES.calls
        await wait_until(lambda: (reported(replica), GATES.calls > before + 3)[1])

    with caplog.at_level(logging.ERROR, "daskserve.replica"):
        run(scenario, Plain)
    assert [each.getMessage() for each in caplog.records] == [
        "record_autoscaling_stats() of replica b#AAAAAA returned nan for 'tokens'; "
        "a value must be a finite number"
    ]


def test_a_child_is_queried_while_its_values_are_in_use_and_they_age() -> None:
    async def main() -> None:
        CLOCK.ahead_s = 0.0
        stats = ChildStats(CLOCK)
        stats.record({"x": 1.0})
        assert not stats.is_wanted
        assert stats.metrics() == {"custom": {"x": 1.0}}
        assert stats.is_wanted
        CLOCK.ahead_s += autoscaling_stats.KEPT_S + 1
        assert not stats.is_wanted
        assert stats.metrics() == {}

    asyncio.run(main())
