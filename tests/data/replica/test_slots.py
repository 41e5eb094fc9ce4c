"""The queue for slots: its order, its length, and that no slot is lost or given twice.

test_isolation.py tests the same through a replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.common.types import SLOT_TAKEN, Envelope, EnvelopeKind, Load, Message, QueueTimeout
from daskserve.data.replica.requests.slots import EXTRA_WAITERS, Slots
from daskserve.errors import ActorLostError, ReplicaBusyError
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.testing import run_virtual


class Holder(Slots):
    """The slots of a replica; the test ends its requests."""

    def __init__(self, concurrency: int) -> None:
        super().__init__("b#AAAAAA", concurrency, ReplicaMetrics())
        self.is_open = True
        #: The names of the requests in the order in which they began, and the names of running requests.
        self.begun: list[Any] = []
        self.running: set[Any] = set()
        self.most = 0

    async def request(
        self,
        name: Any,
        took_s: float,
        left_s: float = 0.0,
        waited_s: float = 0.0,
        send_error: Exception | None = None,
        priority: int = 0,
    ) -> None:
        received: list[Message] = []

        async def send(message: Message) -> None:
            if send_error is not None:
                raise send_error
            received.append(message)

        queue_timeout = QueueTimeout(left_s, waited_s, priority) if left_s else None
        if self.ongoing >= self.concurrency or queue_timeout is not None:
            await self.take(Envelope(EnvelopeKind.CALL, {}, queue_timeout=queue_timeout), send)
        else:
            self.ongoing += 1
        self.begun.append(name)
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        if queue_timeout is None:
            assert received == []
        else:
            (message,) = received
            assert message["type"] == SLOT_TAKEN
            assert message["ongoing"] >= 1
        try:
            await asyncio.sleep(took_s)
        finally:
            self.running.remove(name)
            self.free()


def run(concurrency: int, scenario: Callable[[Holder], Coroutine[Any, Any, None]]) -> None:
    """Play a scenario, and check that it leaves nothing behind."""

    async def main() -> None:
        holder = Holder(concurrency)
        await scenario(holder)
        await asyncio.sleep(1000)
        assert holder.load() == Load(0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main)


async def quiet() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_freed_slot_goes_to_the_oldest_queued_request() -> None:
    async def scenario(holder: Holder) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(holder.request("first", 1.0))
            await quiet()
            for name in "ab":
                group.create_task(holder.request(name, 1.0, 9.0))
            await asyncio.sleep(0.5)
            group.create_task(holder.request("c", 1.0, 9.0, waited_s=0.6))
            group.create_task(holder.request("d", 1.0, 9.0, waited_s=0.4))
            await quiet()
            assert holder.load() == Load(1, 4)
            for _ in range(10):
                with pytest.raises(ReplicaBusyError):
                    await holder.request("hasty", 1.0)
                await asyncio.sleep(0.3)
        assert holder.begun == ["first", *"cabd"]
        assert (now(), holder.most) == (5.0, 1)

    run(1, scenario)


def test_a_line_has_an_end() -> None:
    async def scenario(holder: Holder) -> None:
        room = 3 * 2 + EXTRA_WAITERS
        tasks = [asyncio.create_task(holder.request(n, 1.0, 900.0)) for n in range(3 + room)]
        await quiet()
        assert holder.load() == Load(3, room)
        with pytest.raises(ReplicaBusyError):
            await holder.request("one too many", 1.0, 9.0, waited_s=100.0)
        assert now() == 0.0
        await asyncio.gather(*tasks)

    run(3, scenario)


def test_a_cancelled_request_leaves_the_queue_and_passes_its_slot_on() -> None:
    async def scenario(holder: Holder) -> None:
        tasks = {"first": asyncio.create_task(holder.request("first", 1.0))}
        await quiet()
        for name in "abc":
            tasks[name] = asyncio.create_task(holder.request(name, 1.0, 9.0))
        await quiet()
        tasks["a"].cancel()
        await quiet()
        assert holder.load() == Load(1, 2)
        tasks["first"].cancel()
        await asyncio.sleep(0)  # its slot has gone to b, which has not woken yet
        assert holder.load() == Load(1, 1)
        tasks["b"].cancel()
        await quiet()
        assert (holder.begun, holder.load()) == (["first", "c"], Load(1, 0))
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    run(1, scenario)


def test_requests_queued_at_the_stop_have_not_begun() -> None:
    async def scenario(holder: Holder) -> None:
        running = asyncio.create_task(holder.request("first", 1.0))
        await quiet()
        waiting = [asyncio.create_task(holder.request(name, 1.0, 9.0)) for name in "abc"]
        await quiet()
        waiting[0].cancel()
        holder.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert [each.begun for each in outcomes[1:] if isinstance(each, ActorLostError)] == [False, False]
        assert now() == 0.0
        await holder.wait_until_idle()
        assert now() == 1.0
        await running

    run(1, scenario)


def test_a_request_that_gets_its_slot_during_the_stop_has_not_begun() -> None:
    async def scenario(holder: Holder) -> None:
        first = asyncio.create_task(holder.request("first", 1.0))
        await quiet()
        waiting = asyncio.create_task(holder.request("second", 1.0, 9.0))
        await quiet()
        first.cancel()
        await asyncio.sleep(0)  # its slot has gone to the second, which has not woken yet
        holder.close()
        with pytest.raises(ActorLostError):
            await waiting
        assert holder.begun == ["first"]

    run(1, scenario)


STEPS = st.lists(
    st.tuples(
        st.sampled_from("aaaapppppcrs"),
        st.integers(0, 20),  # tenths of a second that it takes, or which one it is about
        st.integers(1, 20),  # tenths of a second that it has patience
        st.integers(0, 5),  # tenths of a second until the next step
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 3))
def test_random_requests_lose_and_double_no_slot_and_keep_their_order(
    steps: list[tuple[str, int, int, int]], concurrency: int
) -> None:
    """`a` does not wait, `p` and `s` do, `s` ignores notifications; `c` cancels, `r` changes the slots."""

    async def scenario(holder: Holder) -> None:
        tasks: list[asyncio.Task[None]] = []
        patient: dict[int, asyncio.Task[None]] = {}
        least = most = concurrency
        for number, (what, tenths, queue_timeout, pause) in enumerate(steps):
            error = ConnectionError() if what == "s" else None
            if what == "c" and tasks:
                tasks[tenths % len(tasks)].cancel()
            elif what == "r":
                holder.resize(1 + tenths % 3)
                least, most = min(least, holder.concurrency), max(most, holder.concurrency)
            elif what in "aps":
                left_s = 0.0 if what == "a" else queue_timeout / 10
                request = holder.request(number, tenths / 10, left_s, send_error=error)
                tasks.append(asyncio.create_task(request))
                if what == "p":
                    patient[number] = tasks[-1]
            await asyncio.sleep(pause / 10)
            await quiet()
            load = holder.load()
            assert load.ongoing == len(holder.running) <= most
            assert load.ongoing >= holder.concurrency or not load.queued, "a slot is free and a request waits"
        await asyncio.gather(*tasks, return_exceptions=True)
        began = [number for number in holder.begun if number in patient]
        assert began == sorted(began)
        assert holder.most <= most

    run(concurrency, scenario)


async def _hold(holder: Holder, *requests: tuple[str, int]) -> list[Any]:
    tasks = [asyncio.create_task(holder.request("first", 1))]
    await asyncio.sleep(0)
    for name, priority in requests:
        tasks.append(asyncio.create_task(holder.request(name, 1, left_s=500, priority=priority)))
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_higher_priorities_get_slots_first_and_lower_ones_give_way_in_a_full_queue() -> None:
    holder = Holder(1)
    run_virtual(_hold, holder, ("a", 0), ("b", 5), ("c", 0))
    assert holder.begun == ["first", "b", "a", "c"]
    holder = Holder(1)
    many = [(f"low{n}", 0) for n in range(2 + EXTRA_WAITERS)]
    ended = run_virtual(_hold, holder, *many, ("also low", 0), ("high", 1))
    assert holder.begun[1] == "high"
    assert [type(each) for each in ended if each is not None] == [ReplicaBusyError] * 2


def test_a_batch_job_leaves_a_slot_of_several_to_live_requests() -> None:
    async def main() -> None:
        holder = Holder(2)
        batch = Envelope(EnvelopeKind.CALL, {"facts": {"priority": -50}})
        live = Envelope(EnvelopeKind.CALL, {})
        assert holder.take_nowait(batch)
        assert not holder.take_nowait(batch)
        begun = []

        async def wait(name: str, priority: int, envelope: Envelope) -> None:
            queued = replace(envelope, queue_timeout=QueueTimeout(9.0, 0.0, priority))
            await holder.take(queued, _note_nothing)
            begun.append(name)

        tasks = [asyncio.create_task(wait(*each)) for each in (("batch", -50, batch), ("live", 0, live))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert begun == ["live"]
        holder.free(live)  # its slot stays free
        await asyncio.sleep(0)
        assert (begun, holder.ongoing) == (["live"], 1)
        holder.free(batch)
        await asyncio.gather(*tasks)
        assert (begun, holder.ongoing) == (["live", "batch"], 1)
        holder.resize(1)
        holder.free(batch)
        assert holder.take_nowait(batch)  # the only slot is for all

    run_virtual(main)


def test_an_http_request_with_the_priority_of_a_batch_job_gives_its_slot_back() -> None:
    async def main() -> None:
        holder, live = Holder(2), Envelope(EnvelopeKind.CALL, {})
        batch = Envelope(EnvelopeKind.HTTP, {"type": "http"}, queue_timeout=QueueTimeout(9.0, 0.0, -60))
        for _ in range(3):
            assert holder.take_nowait(live)
            assert holder.take_nowait(live)
            waiting = asyncio.create_task(holder.take(batch, _note_nothing))
            await asyncio.sleep(0)
            holder.free(live)
            holder.free(live)
            await waiting
            holder.free(batch)

    run_virtual(main)


def test_a_refusal_has_the_load_of_the_replica_but_none_if_it_is_kept_free_of_batch_jobs() -> None:
    """With a load, the router of a batch job would wait for that load to end."""

    async def main() -> None:
        holder = Holder(1)
        holder.rank_info = (0, 0, 0, 2)
        batch = Envelope(EnvelopeKind.CALL, {"facts": {"priority": -50}})
        live = Envelope(EnvelopeKind.CALL, {})
        assert holder.take_nowait(batch)
        holder.free(batch)
        assert holder.take_nowait(live)
        for envelope, load in ((batch, 0), (live, 1)):
            with pytest.raises(ReplicaBusyError) as caught:
                await holder.take(envelope, _note_nothing)
            assert caught.value.ongoing == load

    run_virtual(main)


async def _note_nothing(message: Message) -> None: ...
