"""Profiles and stacks of replicas, wherever their code runs and whatever it does."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from replica_harness import call, make

from daskserve.data.replica.process import inspection as process_inspection
from daskserve.errors import BadRequestError, InspectionError


class Code:
    """Code that computes, waits and hangs."""

    def work(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            pass

    def hold_lock(self, seconds: int) -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # that is the mistake

    async def wait(self) -> None:
        await self._waits_inside()

    async def _waits_inside(self) -> None:
        await asyncio.sleep(60)


def functions(stacks: dict[str, Any], kind: str) -> set[str]:
    return {
        frame["function"].rpartition(".")[2]
        for each in stacks[kind]
        for frame in each["frames"]
        if frame["is_users"]
    }


async def stacks_with(replica: Any, kind: str, name: str) -> dict[str, Any]:
    """Return the stacks once they contain a function."""
    async with asyncio.timeout(10):
        while True:
            found: dict[str, Any] = await replica.verbs["stacks"]()
            if name in functions(found, kind):
                return found


async def check_profile(replica: Any) -> None:
    running = asyncio.ensure_future(call(replica, "work", 0.4))
    found = await stacks_with(replica, "threads", "work")
    running_code = [each for each in found["threads"] if each["runs_code"]]
    assert len(running_code) == 1, "the event loop has nothing to do"
    found = await replica.verbs["profile"](seconds=0.15)
    assert "Code.work" in {each[0] for each in found["functions"]}
    assert found["busy"] > 0
    assert found["replica"] == "b#AAAAAA"
    await running


def test_a_profile_has_the_code_that_runs() -> None:
    async def main() -> None:
        replica = make(Code)
        await replica.start()
        await check_profile(replica)
        await replica.stop(0)

    asyncio.run(main())


def test_code_that_is_stuck_is_shown() -> None:
    async def main() -> None:
        replica = make(Code)
        await replica.start()
        running = [asyncio.ensure_future(call(replica, "wait")), asyncio.ensure_future(call(replica, "wait"))]
        found = await stacks_with(replica, "tasks", "_waits_inside")
        assert functions(found, "tasks") == {"wait", "_waits_inside"}
        blocked = asyncio.ensure_future(call(replica, "block", 0.3))
        found = await stacks_with(replica, "threads", "block")
        assert [each["kind"] for each in found["threads"] if each["runs_code"]] == ["event loop"]
        await blocked
        for each in running:
            each.cancel()
        await replica.stop(0)

    asyncio.run(main())


def test_a_replica_has_one_profile_at_a_time_and_a_cancelled_one_ends() -> None:
    async def main() -> None:
        replica = make(Code)
        with pytest.raises(InspectionError, match="runs no code"):
            await replica.verbs["stacks"]()
        await replica.start()
        profile = replica.verbs["profile"]
        for wrong in (0, -1, 61, float("nan")):
            with pytest.raises(BadRequestError, match="at most 60"):
                await profile(seconds=wrong)
        first = asyncio.ensure_future(profile(seconds=60))
        await asyncio.sleep(0)
        with pytest.raises(InspectionError, match="already"):
            await profile(seconds=1)
        first.cancel()
        await asyncio.wait([first])
        await profile(seconds=0.02)
        await replica.stop(0)

    asyncio.run(main())


def test_a_process_is_inspected_even_if_its_interpreter_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        replica = make(Code, place="process")
        await replica.start()
        await check_profile(replica)
        monkeypatch.setattr(process_inspection, "ANSWER_S", 0.1)
        running = asyncio.ensure_future(call(replica, "hold_lock", 1))
        async with asyncio.timeout(10):
            while "native" not in (found := await replica.verbs["stacks"]()):
                pass
        assert "in hold_lock" in found["native"]
        assert "code in C" in found["note"]
        with pytest.raises(InspectionError, match="of replica 'b#AAAAAA' did not answer"):
            await replica.verbs["profile"](seconds=0.01)
        await running
        await replica.stop(0)

    asyncio.run(main())
