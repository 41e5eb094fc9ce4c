"""Long poll: listeners converge to the published values, even if the topic loses or reorders updates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.cluster.local.process import plain_copy
from daskserve.cluster.long_poll import (
    CONTROLLER,
    ENDED,
    INLINE_BYTES,
    LISTEN_S,
    SILENCE_S,
    UPDATE,
    WORKERS,
    LongPollClient,
    LongPollHost,
)
from daskserve.cluster.protocols.base import Cluster, TopicHandler
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress
from daskserve.errors import ActorLostError, NotRunningError, UnavailableError
from daskserve.testing import run_virtual, wait_until

pytestmark = pytest.mark.virtual_time


CLOCK = LoopClock()
LARGE = "x" * (INLINE_BYTES + 1)


class Wire:
    """A cluster of one host and one client, in which the test controls all messages between them."""

    instance = "i"

    def __init__(self) -> None:
        self.hosts: dict[int, LongPollHost] = {}
        self.epoch = 0
        self.handlers: list[TopicHandler] = []
        #: The messages that were published and not yet delivered.
        self.updates: list[Any] = []
        self.fetches: list[list[str]] = []
        self.fetch_errors: list[Exception] = []
        self.forgotten = 0
        self.stale_lookups = 0
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        self.new_host()

    def new_host(self) -> LongPollHost:
        self.epoch += 1
        self.hosts[self.epoch] = LongPollHost(self.epoch, self.publish, CLOCK)
        return self.host

    @property
    def host(self) -> LongPollHost:
        return self.hosts[self.epoch]

    def client(self) -> LongPollClient:
        return LongPollClient(cast(Cluster, self), CLOCK)

    def publish(self, message: Any) -> None:
        self.updates.append(plain_copy(message))

    def deliver(self, *numbers: int) -> None:
        """Deliver the pending messages with these numbers, in this order; all if none is given."""
        chosen = [self.updates[number] for number in numbers] if numbers else list(self.updates)
        self.updates.clear()
        self.hear(*chosen)

    def hear(self, *messages: Any) -> None:
        for message in messages:
            for handler in list(self.handlers):
                handler(plain_copy(message))

    # what the client asks of a cluster

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        self.handlers.append(handler)

        async def unsubscribe() -> None:
            self.handlers.remove(handler)

        return unsubscribe

    async def controller(self) -> ActorAddress:
        await asyncio.sleep(0)
        if self.stale_lookups:
            return ActorAddress("c", "w", self.epoch - 1)
        return ActorAddress("c", "w", self.epoch)

    def forget_controller(self) -> None:
        self.forgotten += 1
        self.stale_lookups = max(0, self.stale_lookups - 1)

    async def call(self, address: ActorAddress, verb: str, *, keys: Sequence[str]) -> Any:
        assert verb == "fetch"
        self.fetches.append(list(keys))
        if self.fetch_errors:
            raise self.fetch_errors.pop(0)
        answer = plain_copy(self.hosts[address.incarnation].fetch(keys))
        if self.before_answer is not None:
            await self.before_answer()
        return answer


@pytest.fixture
def wire() -> Wire:
    return Wire()


async def quiet() -> None:
    """Wait until all code that takes no time has run."""
    await asyncio.sleep(0.001)


async def started(wire: Wire, *keys: str) -> tuple[LongPollClient, dict[str, list[Any]]]:
    """Return a client that watches keys and knows their values, and the values reported for each key."""
    client = wire.client()
    await client.start()
    received: dict[str, list[Any]] = {key: [] for key in keys}
    for key in keys:
        client.watch(key, received[key].append)
    await quiet()
    wire.fetches.clear()
    return client, received


# ---- the host


async def test_a_change_has_a_number_and_is_published_once(wire: Wire) -> None:
    assert wire.host.snapshot_id == (1, 0)
    assert wire.host.notify({"a": 1, "b": [2]}) == (1, 1)
    assert [each.pop("at") > 0 for each in wire.updates] == [True]
    assert wire.updates == [
        {"kind": UPDATE, "epoch": 1, "counter": 1, "changes": (("a", True, 1), ("b", True, (2,)))}
    ]


async def test_an_unchanged_value_is_not_published_again(wire: Wire) -> None:
    wire.host.notify({"a": {"x": [1]}})
    assert wire.host.notify({"a": {"x": [1]}, "never": None}) == (1, 1)
    assert wire.host.notify({"a": {"x": [1]}, "b": 1}) == (1, 2)
    assert wire.host.notify({"a": None}) == (1, 3)
    assert wire.host.notify({"a": None}) == (1, 3)
    assert [len(each["changes"]) for each in wire.updates] == [1, 1, 1]


@pytest.mark.parametrize(("value", "is_inline"), [("x" * (INLINE_BYTES - 10), True), (LARGE, False)])
async def test_large_values_are_not_part_of_the_update(value: str, is_inline: bool, wire: Wire) -> None:
    wire.host.notify({"a": value})
    assert wire.updates[0]["changes"] == (("a", is_inline, value if is_inline else None),)
    assert wire.host.fetch(["a"])["values"] == {"a": value}


async def test_fetch_returns_the_newest_values_of_the_given_keys(wire: Wire) -> None:
    wire.host.notify({"a": 1, "b": 2})
    wire.host.notify({"a": None})
    assert wire.host.fetch(["a", "b", "never"]) == {
        "epoch": 1,
        "counter": 2,
        "values": {"a": None, "b": 2, "never": None},
    }


async def test_listening_returns_stale_keys_immediately(wire: Wire) -> None:
    wire.host.notify({"a": 1})
    wire.host.notify({"b": 2})
    for stale in (None, (1, 0), (0, 1), (9, 1)):
        assert await wire.host.listen_for_change({"a": stale, "b": (1, 2)}) == {"a": ((1, 1), 1)}
    assert await wire.host.listen_for_change({"a": None, "gone": (1, 7)}) == {
        "a": ((1, 1), 1),
        "gone": ((1, 0), None),
    }
    assert asyncio.get_running_loop().time() == 0


async def test_listening_wakes_for_its_own_keys_only(wire: Wire) -> None:
    wire.host.notify({"a": 1, "b": 1})
    waits = {
        key: asyncio.create_task(wire.host.listen_for_change({key: [1, 1]}))
        for key in ("a", "b")  # type: ignore[dict-item]
    }
    await asyncio.sleep(5)
    wire.host.notify({"a": 2})
    assert await waits["a"] == {"a": ((1, 2), 2)}
    await asyncio.sleep(5)
    assert not waits["b"].done()
    assert wire.host.waiting == 1
    wire.host.notify({"b": None})
    assert await waits["b"] == {"b": ((1, 0), None)}
    assert wire.host.waiting == 0


async def test_listening_returns_empty_after_30_seconds(wire: Wire) -> None:
    wire.host.notify({"a": 1})
    waiting = asyncio.create_task(wire.host.listen_for_change({"a": (1, 1)}))
    await asyncio.sleep(LISTEN_S - 1)
    wire.host.notify({"other": 1})  # does not restart the wait
    assert await waiting == {}
    assert asyncio.get_running_loop().time() == LISTEN_S


# ---- the client, in good weather


async def test_a_watcher_gets_the_current_value_and_every_change(wire: Wire) -> None:
    wire.host.notify({"a": 1})
    client, received = await started(wire, "a")
    assert received["a"] == [1]
    for value in (2, [3], None):
        wire.host.notify({"a": value})
        wire.deliver()
    assert received["a"] == [1, 2, (3,), None]
    assert client.snapshot_id == (1, 4)
    assert wire.fetches == []


async def test_a_second_watcher_gets_the_known_value_immediately(wire: Wire) -> None:
    wire.host.notify({"a": 1})
    client, _ = await started(wire, "a")
    received: list[Any] = []
    client.watch("a", received.append)
    assert received == [1]
    assert wire.fetches == []


async def test_a_watcher_of_an_unknown_key_gets_none(wire: Wire) -> None:
    _, received = await started(wire, "never")
    assert received["never"] == [None]


async def test_an_update_without_watchers_only_advances_the_snapshot(wire: Wire) -> None:
    client, received = await started(wire, "a")
    wire.host.notify({"b": LARGE})
    wire.deliver()
    await quiet()
    assert client.snapshot_id == (1, 1)
    assert received["a"] == [None]
    assert wire.fetches == []


async def test_only_a_large_value_is_fetched(wire: Wire) -> None:
    client, received = await started(wire, "a")
    wire.host.notify({"a": LARGE})
    wire.deliver()
    assert client.snapshot_id == (1, 0)
    await quiet()
    assert received["a"] == [None, LARGE]
    assert client.snapshot_id == (1, 1)
    assert wire.fetches == [["a"]]


async def test_a_stopped_watcher_gets_no_more_values_and_can_watch_again(wire: Wire) -> None:
    client, received = await started(wire, "a")
    more: list[Any] = []
    stop = client.watch("b", more.append)
    await quiet()
    stop()
    stop()
    wire.host.notify({"a": 1, "b": 1})
    wire.deliver()
    assert more == [None]
    client.watch("b", more.append)
    await quiet()
    assert more == [None, 1]
    assert received["a"][-1] == 1


async def test_a_watcher_that_leaves_before_its_first_value_costs_no_fetches_later(wire: Wire) -> None:
    client, received = await started(wire, "a")
    client.watch("b", received["a"].append)()
    await quiet()
    wire.fetches.clear()
    wire.host.notify({"a": 1})
    wire.deliver()
    await quiet()
    assert (received["a"], client.snapshot_id, wire.fetches) == ([None, 1], (1, 1), [])


async def test_a_value_that_arrives_after_its_watcher_left_is_not_kept(wire: Wire) -> None:
    """The value is no longer updated, so the next watcher must not get it."""
    wire.host.notify({"a": "old"})
    client = wire.client()
    await client.start()
    stop = client.watch("a", lambda value: None)

    async def leave() -> None:
        stop()

    wire.before_answer = leave
    await quiet()
    wire.before_answer = None
    wire.host.notify({"a": "new"})
    wire.deliver()
    await quiet()
    received: list[Any] = []
    client.watch("a", received.append)
    await quiet()
    assert received == ["new"]


async def test_waiting_for_a_snapshot(wire: Wire) -> None:
    client, received = await started(wire, "a")
    await client.wait_for_snapshot((1, 0), 1)
    snapshot = wire.host.notify({"a": LARGE})
    waiting = asyncio.create_task(client.wait_for_snapshot(snapshot, 1))
    await quiet()
    assert not waiting.done()
    wire.deliver()
    await waiting
    assert received["a"][-1] == LARGE
    with pytest.raises(TimeoutError):
        await client.wait_for_snapshot((1, 2), 3)
    assert asyncio.get_running_loop().time() >= 3
    with pytest.raises(TimeoutError):
        await client.wait_for_snapshot((1, 2), -1)


async def test_callbacks_run_when_workers_leave_and_when_the_instance_ends(wire: Wire) -> None:
    client, _ = await started(wire)
    heard: list[Any] = []
    client.on_worker_left(heard.append)
    client.on_ended(lambda: heard.append("ended"))
    wire.hear(
        {"kind": WORKERS, "joined": [{"address": "w9"}], "left": ["w1", "w2"]},
        {"kind": "unheard of"},
        {"kind": ENDED},
    )
    assert heard == ["w1", "w2", "ended"]


# ---- the client, in bad weather


async def test_a_gap_makes_the_client_fetch_all_watched_keys(wire: Wire) -> None:
    client, received = await started(wire, "a", "b")
    for number in (1, 2, 3):
        wire.host.notify({"a": number} if number != 2 else {"b": number})
    wire.deliver(0, 2)
    assert client.snapshot_id == (1, 1)
    await quiet()
    assert client.snapshot_id == (1, 3)
    assert (received["a"][-1], received["b"][-1]) == (3, 2)
    assert wire.fetches == [["a", "b"]]


async def test_old_updates_are_ignored(wire: Wire) -> None:
    client, received = await started(wire, "a")
    for number in (1, 2, 3):
        wire.host.notify({"a": number})
    updates = list(wire.updates)
    wire.deliver()
    wire.hear(*updates, *reversed(updates))
    await quiet()
    assert received["a"] == [None, 1, 2, 3]
    assert client.snapshot_id == (1, 3)
    assert wire.fetches == []


async def test_a_new_controller_makes_the_client_fetch_everything(wire: Wire) -> None:
    wire.host.notify({"a": "old", "b": "old"})
    client, received = await started(wire, "a", "b")
    wire.new_host()
    wire.host.notify({"a": "new"})
    wire.deliver(1)
    await quiet()
    assert client.snapshot_id == (2, 1)
    assert (received["a"][-1], received["b"][-1]) == ("new", None)


async def test_updates_of_the_old_controller_are_ignored(wire: Wire) -> None:
    client, received = await started(wire, "a")
    old = wire.host
    wire.new_host().notify({"a": "new"})
    wire.deliver()
    await quiet()
    old.notify({"a": "old"})
    wire.deliver()
    await quiet()
    assert received["a"][-1] == "new"
    assert client.snapshot_id == (2, 1)


async def test_a_fetch_answered_by_the_old_controller_is_ignored(wire: Wire) -> None:
    """The old controller was replaced but is alive, and this process still has its address."""
    wire.host.notify({"a": "old"})
    client, received = await started(wire, "a")
    wire.new_host().notify({"a": "new"})
    wire.stale_lookups = 2
    wire.deliver(1)
    await asyncio.sleep(1)
    assert received["a"][-1] == "new"
    assert client.snapshot_id == (2, 1)
    assert wire.forgotten == 2
    assert len(wire.fetches) < 10


async def test_silence_makes_the_client_check_for_missed_updates(wire: Wire) -> None:
    client, received = await started(wire, "a", "b")
    wire.host.notify({"a": 1})
    wire.updates.clear()
    await asyncio.sleep(SILENCE_S + 1)
    assert client.snapshot_id == (1, 1)
    assert received["a"][-1] == 1
    before = len(wire.fetches)
    await asyncio.sleep(SILENCE_S)
    assert wire.fetches[before:] == [[]]  # nothing is asked for if nothing was missed


async def test_the_client_fetches_from_a_new_controller(wire: Wire) -> None:
    """The client may have missed updates that the controller published before the client knew its address."""
    _, received = await started(wire, "a")
    wire.new_host().notify({"a": "new"})
    wire.updates.clear()
    wire.hear({"kind": CONTROLLER, "name": "c", "worker": "w", "incarnation": 2})
    await quiet()
    assert received["a"][-1] == "new"
    assert wire.forgotten == 1


@pytest.mark.parametrize(
    "error",
    [ActorLostError("gone"), UnavailableError("starting"), NotRunningError("not yet"), OSError("net")],
)
async def test_a_failed_fetch_is_retried_with_growing_delays(error: Exception, wire: Wire) -> None:
    wire.host.notify({"a": 1})
    wire.fetch_errors = [error] * 12
    client = wire.client()
    await client.start()
    received: list[Any] = []
    client.watch("a", received.append)
    await wait_until(lambda: received, timeout_s=30)
    assert received == [1]
    assert len(wire.fetches) == 13
    assert 2 < asyncio.get_running_loop().time() < 15
    assert wire.forgotten == 12


async def test_a_watcher_that_raises_does_not_stop_the_listener(wire: Wire) -> None:
    client = wire.client()
    await client.start()

    def spoil(value: Any) -> None:
        if value is None:
            raise KeyError("not for me")

    client.watch("a", spoil)
    received: list[Any] = []
    client.watch("b", received.append)
    wire.host.notify({"b": LARGE})
    wire.updates.clear()
    await asyncio.sleep(2 * SILENCE_S)
    assert received[-1] == LARGE


async def test_a_watcher_added_during_a_fetch_gets_its_value(wire: Wire) -> None:
    wire.host.notify({"a": 1, "b": 1})
    client = wire.client()
    await client.start()
    received: list[Any] = []

    async def join() -> None:
        wire.before_answer = None
        client.watch("b", received.append)

    wire.before_answer = join
    client.watch("a", received.append)
    await quiet()
    assert received == [1, 1]


async def test_an_update_that_overtakes_a_fetch_is_not_lost(wire: Wire) -> None:
    """The answer was created before the change, and arrives after the update about it."""
    wire.host.notify({"a": 1, "b": 1})
    client = wire.client()
    await client.start()
    received: list[Any] = []
    client.watch("b", lambda value: None)
    await quiet()

    async def overtake() -> None:
        wire.before_answer = None
        wire.updates.clear()
        wire.host.notify({"a": 2})
        wire.host.notify({"b": 2})
        wire.deliver()

    wire.before_answer = overtake
    client.watch("a", received.append)
    await quiet()
    assert received[-1] == 2
    assert client.snapshot_id == (1, 3)


# ---- beginning and ending


async def test_starting_twice_subscribes_once_and_stopping_unsubscribes(wire: Wire) -> None:
    client = wire.client()
    await asyncio.gather(client.start(), client.start())
    await client.start()
    assert len(wire.handlers) == 1
    await client.stop()
    await client.stop()
    assert wire.handlers == []
    await asyncio.sleep(3 * SILENCE_S)
    assert len(wire.fetches) == 0


async def test_stopping_cancels_a_start_that_waits(wire: Wire) -> None:
    client = wire.client()

    async def never(handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        await asyncio.Event().wait()
        raise AssertionError

    wire.subscribe = never  # type: ignore[method-assign]
    starting = asyncio.create_task(client.start())
    await quiet()
    await client.stop()
    await asyncio.wait({starting}, timeout=1)
    assert starting.cancelled()


async def test_a_failed_start_can_be_retried(wire: Wire) -> None:
    client = wire.client()
    subscribe = wire.subscribe

    async def broken(handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        raise OSError("no scheduler")

    wire.subscribe = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no scheduler"):
        await client.start()
    wire.subscribe = subscribe  # type: ignore[method-assign]
    await client.start()
    received: list[Any] = []
    client.watch("a", received.append)
    await quiet()
    assert received == [None]


async def test_a_cancelled_start_does_not_cancel_it_for_other_callers(wire: Wire) -> None:
    client = wire.client()
    gate = asyncio.Event()
    subscribe = wire.subscribe

    async def slow(handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        await gate.wait()
        return await subscribe(handler)

    wire.subscribe = slow  # type: ignore[method-assign]
    first, second = asyncio.create_task(client.start()), asyncio.create_task(client.start())
    await quiet()
    first.cancel()
    await quiet()
    gate.set()
    await second
    assert len(wire.handlers) == 1


class HidesCancellation:
    """A cluster whose calls turn cancellations into errors."""

    instance = "i"

    def __init__(self) -> None:
        self.asked = 0

    async def subscribe(self, handler: Any) -> Any:
        async def unsubscribe() -> None: ...

        return unsubscribe

    def forget_controller(self) -> None: ...

    async def controller(self) -> Any:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise UnavailableError("the connection was closed") from None


async def test_listening_ends_even_if_its_cancellation_is_swallowed() -> None:
    cluster = HidesCancellation()
    listener = LongPollClient(cast(Cluster, cluster), CLOCK)
    await listener.start()
    listener.watch("routes", lambda value: None)
    async with asyncio.timeout(10):
        while not cluster.asked:  # noqa: ASYNC110 - the seam has no event for it
            await asyncio.sleep(0)
        (listening,) = asyncio.all_tasks() - {asyncio.current_task()}
        await listener.stop()
        await asyncio.wait([listening])
    assert cluster.asked == 1


# ---- any weather

values = st.none() | st.integers(0, 3) | st.just(LARGE)
changes = st.dictionaries(st.sampled_from(["a", "b", "c"]), values, min_size=1, max_size=3)
deliveries = st.lists(st.floats(0, 2), max_size=3)  # of one message: how often and when it arrives


@given(
    history=st.lists(st.tuples(changes, deliveries, st.booleans(), st.floats(0, 1)), max_size=12),
    watched=st.sets(st.sampled_from(["a", "b", "c"]), min_size=1),
)
def test_the_listener_converges_whatever_happens_to_the_updates(
    history: list[tuple[Mapping[str, Any], list[float], bool, float]], watched: set[str]
) -> None:
    """Updates are lost, duplicated, delayed and reordered, and controllers are replaced in between."""

    async def main() -> None:
        wire = Wire()
        client = wire.client()
        await client.start()
        seen: dict[str, Any] = {}
        snapshots = []
        for key in watched:
            client.watch(key, lambda value, key=key: seen.__setitem__(key, value))  # type: ignore[misc]
        loop = asyncio.get_running_loop()
        for change, arrivals, is_replaced, pause_s in history:
            if is_replaced:
                published = wire.host.fetch(["a", "b", "c"])["values"]
                wire.new_host().notify(published)
            wire.host.notify(change)
            for message in wire.updates:
                for delay_s in arrivals:
                    loop.call_later(delay_s, wire.hear, message)
            wire.updates.clear()
            await asyncio.sleep(pause_s)
            snapshots.append(client.snapshot_id)
        await asyncio.sleep(2 * SILENCE_S)
        assert client.snapshot_id == wire.host.snapshot_id
        assert seen == wire.host.fetch(sorted(watched))["values"]
        assert snapshots == sorted(snapshots)

    run_virtual(main)


# ---- metrics


async def test_the_delay_of_a_change_is_measured_with_and_without_a_fetch(wire: Wire) -> None:
    client, _ = await started(wire, "a")
    before = counts(client)
    wire.host.notify({"a": 1})
    wire.updates[0]["at"] -= 20.0
    wire.deliver()
    await quiet()
    assert (delays(client)[-3], sum(delays(client))) == (1, 1)  # from 10 to 30 s
    wire.host.notify({"a": LARGE})
    wire.updates[0]["at"] += 1000.0  # of a host whose clock is ahead
    wire.deliver()
    await quiet()
    assert (delays(client)[0], sum(delays(client))) == (1, 2)
    assert counts(client)["long_poll_fetches"] == before["long_poll_fetches"] + 1
    wire.fetch_errors.append(UnavailableError("being replaced"))
    wire.host.notify({"a": LARGE + "x"})
    wire.deliver()
    await asyncio.sleep(1)
    assert counts(client)["long_poll_fetch_failures"] == 1
    assert counts(client)["long_poll_fetches"] == before["long_poll_fetches"] + 3
    await client.stop()


def counts(client: LongPollClient) -> dict[str, Any]:
    return {name: value for name, labels, value in client.samples() if labels == ("i",)}


def delays(client: LongPollClient) -> list[int]:
    return list(counts(client)["long_poll_delay_seconds"].counts)


async def test_a_listener_knows_since_when_no_controller_has_answered(wire: Wire) -> None:
    client, _ = await started(wire, "a")
    assert client.silent_since is None
    lost_at = CLOCK.now()
    wire.fetch_errors += [UnavailableError("no controller")] * 5
    client.ask()
    await asyncio.sleep(0.05)
    assert client.silent_since == pytest.approx(lost_at, abs=0.01)
    await wait_until(lambda: not wire.fetch_errors)
    await wait_until(lambda: client.silent_since is None)
    for is_update in (True, False):
        wire.fetch_errors += [UnavailableError("no controller")] * 8
        client.ask()
        await asyncio.sleep(0.05)
        assert client.silent_since is not None
        if is_update:
            wire.host.notify({"a": 2})
            wire.deliver()
        else:
            client.refresh()
        assert client.silent_since is None, "news are as good as an answer"
        await wait_until(lambda: not wire.fetch_errors)
    await client.stop()
