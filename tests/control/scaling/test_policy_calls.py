"""User policies that hang, end the process, do not load, or answer too late."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scaler_harness import Desk, attended

from daskserve.autoscaling import AutoscalingContext
from daskserve.common.clock import LoopClock
from daskserve.control.scaling import policy_calls
from daskserve.control.scaling.importing import REMEDY
from daskserve.control.scaling.policy_calls import POLICY_RETRY_S
from daskserve.errors import UserCodeError
from daskserve.testing import run_virtual, wait_until


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with user policies; setting ``go_on`` ends the calls that hang."""
    module = ModuleType("policies_of_the_users")
    go_on = threading.Event()

    def hang(context: AutoscalingContext) -> int:
        go_on.wait(30)
        return 9

    module.__dict__.update(go_on=go_on, hang=hang, five=lambda context: 5)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(policy_calls, "ANSWER_TIMEOUT_S", 0.1)
    yield module
    go_on.set()


def raising(error: BaseException) -> Callable[[AutoscalingContext], int]:
    def policy(context: AutoscalingContext) -> int:
        raise error

    return policy


class _Mute(SystemExit):
    def __str__(self) -> str:
        sys.exit(4)


ENDS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), _Mute()]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_no_exception_of_a_policy_ends_the_loop(error: BaseException, policies: Any) -> None:
    async def scene(desk: Desk) -> None:
        policies.ends = raising(error)
        desk.put(f"{policies.__name__}:ends")
        await wait_until(lambda: type(error).__name__ in desk.reason())
        assert "nothing changes" in desk.reason()
        desk.put(f"{policies.__name__}:five")
        await wait_until(lambda: desk.wants() == 5)

    asyncio.run(attended(scene))


def test_a_module_that_exits_during_import_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_at_once.py").write_text("raise SystemExit('not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scene(desk: Desk) -> None:
        desk.put("ends_at_once:policy")
        await wait_until(lambda: "cannot be used: SystemExit: not here" in desk.reason())

    asyncio.run(attended(scene))


def test_a_hanging_policy_is_replaced_by_the_next_one(
    policies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(desk: Desk) -> None:
        desk.put(f"{policies.__name__}:hang")
        await wait_until(lambda: "has not answered" in desk.reason())
        decided_at = desk.decided().at
        await wait_until(lambda: desk.decided().at > decided_at)
        desk.put(f"{policies.__name__}:five")
        await wait_until(lambda: desk.wants() == 5)

    with caplog.at_level(logging.WARNING, "daskserve.autoscaling"):
        asyncio.run(attended(scene))
    messages = [each.getMessage() for each in caplog.records]
    assert sum("has not answered" in each for each in messages) == 1
    assert sum("its thread is abandoned; abandoned threads: 1" in each for each in messages) == 1


def test_a_module_that_hangs_during_import_is_replaced_by_one_with_another_name(
    policies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the first import ends, Python imports no corrected module of that name; the reason says so."""
    text = f"from {policies.__name__} import go_on\ngo_on.wait(30)\ndef policy(context): return 8\n"
    (tmp_path / "hangs_at_once.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    mended = "def policy(context): return 5\n"

    async def scene(desk: Desk) -> None:
        desk.put("hangs_at_once:policy")
        await wait_until(lambda: "still being loaded" in desk.reason())
        assert f"it is at {tmp_path}/hangs_at_once.py:2, importing hangs_at_once;" in desk.reason()
        (tmp_path / "hangs_at_once.py").write_text(mended)
        desk.put("hangs_at_once:policy", max_replicas=8)
        await wait_until(lambda: "an earlier import of hangs_at_once has not ended" in desk.reason())
        assert REMEDY in desk.reason()
        (tmp_path / "hangs_no_more.py").write_text(mended)
        desk.put("hangs_no_more:policy")
        await wait_until(lambda: desk.wants() == 5)
        desk.put("hangs_at_once:policy")
        await wait_until(lambda: "still being loaded" in desk.reason())
        policies.go_on.set()
        await wait_until(lambda: desk.wants() == 8)

    with caplog.at_level(logging.WARNING, "daskserve.autoscaling"):
        asyncio.run(attended(scene))
    messages = [each.getMessage() for each in caplog.records if "still being loaded" in each.getMessage()]
    assert len(messages) == 3
    assert all(REMEDY in each for each in messages)


@pytest.mark.parametrize(
    ("policy", "least", "why"),
    [
        ("no_such_module:policy", 0, "cannot be used"),
        ("no_such_module:policy", 2, "cannot be used"),
        ("policies_of_the_users:hang", 0, "has not answered"),
        ("policies_of_the_users:hangs_when_made", 0, "still being loaded"),
        ("policies_of_the_users:ends", 0, "SystemExit"),
    ],
)
def test_waiting_requests_at_zero_start_a_replica_without_the_policy(
    policy: str, least: int, why: str, policies: Any
) -> None:
    class HangsWhenMade:
        def __init__(self) -> None:
            policies.go_on.wait(30)

        __call__ = staticmethod(policies.five)

    policies.ends = raising(SystemExit())
    policies.hangs_when_made = HangsWhenMade

    async def scene(desk: Desk) -> None:
        record = desk.put(policy, min_replicas=least)
        desk.set(replace(record, scaled_to=0))
        await wait_until(lambda: why in desk.reason())
        assert desk.wants() is None
        desk.request_waits()
        await wait_until(lambda: desk.wants() is not None)
        assert desk.wants() == max(1, least)
        assert why in desk.reason()
        assert "for the waiting requests" in desk.reason()

    asyncio.run(attended(scene))


def test_a_policy_that_does_not_load_is_retried_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scene(desk: Desk) -> None:
        desk.put("comes_later:policy", metrics_interval_s=1.0)
        await desk.clock.sleep(2.5 * POLICY_RETRY_S)
        assert "comes_later" in desk.reason()
        (tmp_path / "comes_later.py").write_text("def policy(context): return 6\n")
        await wait_until(lambda: desk.wants() == 6, timeout_s=POLICY_RETRY_S + 2, every_s=0.5)

    with caplog.at_level(logging.WARNING, "daskserve.autoscaling"):
        run_virtual(attended, scene)
    assert [each.message for each in caplog.records if "cannot be used" in each.message] == [
        "The autoscaling policy of backend 'b' cannot be used"
    ]


def test_wrong_options_and_a_failing_policy_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moody.py").write_text("def policy(context): raise RuntimeError('no mood')\n")

    async def scene(desk: Desk) -> None:
        desk.put("moody:policy", metrics_interval_s=1.0, downscale_delay_s=5, look_back_period_s=30)
        await desk.clock.sleep(10)
        assert "RuntimeError: no mood" in desk.reason()

    with caplog.at_level(logging.WARNING, "daskserve.autoscaling"):
        run_virtual(attended, scene)
    warned, failed = caplog.records
    assert "downscale_delay_s=5 is less than look_back_period_s=30" in warned.message
    assert failed.message.startswith("The autoscaler of backend 'b': the policy failed")
    assert isinstance(failed.exc_info and failed.exc_info[1], RuntimeError)


def test_hanging_policies_take_no_thread_from_others(policies: Any) -> None:
    pool = min(32, (os.cpu_count() or 1) + 4)

    async def scene(desk: Desk) -> None:
        stuck = [f"stuck-{number}" for number in range(pool)]
        for tag in stuck:
            desk.put(f"{policies.__name__}:hang", tag)
        await wait_until(lambda: all("has not answered" in desk.reason(tag) for tag in stuck))
        desk.put(f"{policies.__name__}:five", "good")
        await wait_until(lambda: desk.wants("good") == 5)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"
        threads = [each for each in threading.enumerate() if "daskserve-policy-stuck" in each.name]
        assert len(threads) == pool

    asyncio.run(attended(scene))


def test_a_hanging_policy_does_not_keep_the_process_from_ending() -> None:
    program = """
import asyncio, threading
from daskserve.common.clock import LoopClock
from daskserve.control.scaling import policy_calls
from daskserve.control.scaling.importing import REMEDY
policy_calls.ANSWER_TIMEOUT_S = 0.05
async def main():
    try:
        await policy_calls.PolicyCall(LoopClock(), "hangs", threading.Event().wait).wait()
    except TimeoutError:
        print("hangs")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=True)
    assert done.stdout == b"hangs\n"


def test_a_late_answer_does_not_apply_to_other_options_or_another_number(policies: Any) -> None:
    asked: list[tuple[int, int]] = []

    def stubborn(context: AutoscalingContext) -> int:
        asked.append((context.target_num_replicas, context.config.max_replicas))
        if asked[0] == asked[-1]:
            policies.go_on.wait(30)
        return context.target_num_replicas + 1

    policies.stubborn = stubborn

    async def other_number(desk: Desk) -> None:
        record = desk.put(f"{policies.__name__}:stubborn")
        await wait_until(lambda: "has not answered" in desk.reason())
        desk.set(replace(record, scaled_to=7))
        await wait_until(lambda: desk.decided().based_on == 7)
        policies.go_on.set()
        assert await wait_until(desk.wants) == 8
        assert asked == [(3, 9), (7, 9)]

    async def other_options(desk: Desk) -> None:
        desk.put(f"{policies.__name__}:stubborn")
        await wait_until(lambda: "has not answered" in desk.reason())
        desk.put(f"{policies.__name__}:stubborn", max_replicas=6)
        policies.go_on.set()
        assert await wait_until(desk.wants) == 4
        assert asked == [(3, 9), (3, 6)]

    for scene in (other_number, other_options):
        asked.clear()
        policies.go_on.clear()
        asyncio.run(attended(scene))


def test_an_error_whose_text_raises_is_reported_by_its_type() -> None:
    async def main() -> None:
        def speechless() -> None:
            raise _Mute

        with pytest.raises(UserCodeError, match=r"^_Mute: <its text cannot be made: ") as caught:
            await policy_calls.PolicyCall(LoopClock(), "mute", speechless).wait()
        assert isinstance(caught.value.__cause__, _Mute)

    asyncio.run(main())
