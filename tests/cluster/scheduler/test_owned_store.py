"""Clusters that share a store: a new instance takes it over once it serves, and harms no other before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from store_harness import (
    DURABLE,
    Crash,
    Trap,
    TrappedFolder,
    every_step,
    folder_store,
    place,
    trapped_sqlite,
)

from daskserve.cluster.protocols.stores import (
    TRANSITIONS,
    Claim,
    OwnershipEvent,
    StoreChange,
    StoreOwnership,
    next_ownership,
)
from daskserve.cluster.scheduler.owned_store import PATIENCE_S, Mirror, OwnedStore, owned_store
from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.cluster.store.opening import MemoryStore
from daskserve.common.clock import LoopClock
from daskserve.errors import StaleEpochError, StoreTakenError, UnavailableError

OWN = ("replica/", "proxy/")
MakeShared = Callable[[], Any]


class HandClock(LoopClock):
    """A clock whose time a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


class Instances:
    """Instances of one name on separate clusters, with one store."""

    def __init__(self, make: MakeShared) -> None:
        self._make = make
        self.clock = HandClock()
        self.opened: list[OwnedStore] = []

    async def new(self, owner: str, **begun: Any) -> OwnedStore:
        """Return the store of an instance that begins; by default on a trial."""
        store = OwnedStore(self._make(), f"{owner}.1", self.clock)
        await store.open()
        self.opened.append(store)
        await store.begin(**begun)
        return store

    async def running(self, owner: str, **records: bytes) -> OwnedStore:
        """Return the store of an instance that serves."""
        store = await self.new(owner)
        epoch = await store.claim_epoch()
        assert await take_over(store, epoch) is not None
        await store.commit(epoch, change(records))
        return store


@pytest.fixture(params=["sqlite", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeShared:
    """Return a factory of stores at one location, for two kinds that outlive their scheduler."""
    at = place(request.param, tmp_path)
    return lambda: at("i")


@pytest.fixture
@asynccontextmanager
async def instances(make: MakeShared) -> AsyncIterator[Instances]:
    instances = Instances(make)
    try:
        yield instances
    finally:
        for store in instances.opened:
            await store.close()


def change(records: Mapping[str, bytes | None], *, must_last: bool = True) -> StoreChange:
    return StoreChange({key.replace("_", "/"): each for key, each in records.items()}, must_last=must_last)


async def take_over(store: OwnedStore, epoch: int, *, is_complete: bool = True) -> Any:
    return await store.take_over(epoch, is_complete=is_complete, own=OWN)


async def stored(instances: Instances) -> Mapping[str, bytes]:
    """Return the content of the store, whichever instance owns it."""
    place = instances._make()
    await place.open()
    try:
        found: Mapping[str, bytes] = await place.load()
        return found
    finally:
        await place.close()


# ---- the table


def test_the_table_of_holds() -> None:
    ways = {
        (StoreOwnership.TRIAL, OwnershipEvent.CLAIM): StoreOwnership.CLAIMED,
        (StoreOwnership.TRIAL, OwnershipEvent.OVERTAKEN): StoreOwnership.REFUSED,
        (StoreOwnership.CLAIMED, OwnershipEvent.WRITE): StoreOwnership.HELD,
        (StoreOwnership.CLAIMED, OwnershipEvent.OVERTAKEN): StoreOwnership.TAKEN,
        (StoreOwnership.HELD, OwnershipEvent.OVERTAKEN): StoreOwnership.TAKEN,
        (StoreOwnership.TAKEN, OwnershipEvent.GIVEN_BACK): StoreOwnership.CLAIMED,
        (StoreOwnership.CLAIMED, OwnershipEvent.RELEASE): StoreOwnership.RELEASED,
        (StoreOwnership.HELD, OwnershipEvent.RELEASE): StoreOwnership.RELEASED,
    }
    assert ways == TRANSITIONS
    for hold, turn in product(StoreOwnership, OwnershipEvent):
        assert next_ownership(hold, turn) is ways.get((hold, turn), hold)
    # Only an instance that has claimed the store may write, and a trial must claim it first.
    assert [hold for hold in StoreOwnership if hold.is_ours] == [StoreOwnership.CLAIMED, StoreOwnership.HELD]


def test_a_mirror_holds_what_was_stored_last() -> None:
    mirror = Mirror()
    mirror.know({"old": b"1"})
    mirror.know({"kept": b"1", "gone": b"2"})
    mirror.apply({"kept": b"3", "gone": None, "new": b"4"})
    assert mirror.records == {"kept": b"3", "new": b"4"}


async def test_before_a_start_changes_are_written_at_once(tmp_path: Path) -> None:
    store = OwnedStore(cast("Any", place("sqlite", tmp_path)("i")), "one.1", LoopClock())
    await store.open()
    await store.commit(await store.claim_epoch(), change({"backend_a": b"1"}))
    assert await store.shared.load() == {"backend/a": b"1"}
    await store.close()


def test_a_store_in_memory_has_no_other_owner() -> None:
    store = MemoryStore()
    assert owned_store(store, "start") is store
    assert store.ownership is StoreOwnership.HELD


# ---- a start


async def test_a_trial_leaves_the_store_to_the_instance_that_has_it(instances: Instances) -> None:
    old = await instances.running("old", backend_a=b"1", replica_a=b"old")
    new = await instances.new("new")
    epoch = await new.claim_epoch()
    assert await new.load() == {"backend/a": b"1", "replica/a": b"old"}
    await new.commit(epoch, change({"replica_a": b"new"}, must_last=False))
    with pytest.raises(UnavailableError, match="still starting"):
        await new.commit(epoch, change({"backend_b": b"1"}))
    assert (await new.load())["replica/a"] == b"new"
    assert new.ownership is StoreOwnership.TRIAL
    await old.commit(1, change({"backend_a": b"2"}))
    await old.check()
    assert old.ownership is StoreOwnership.HELD
    await new.release(gives_back=True)  # its start has failed
    assert await stored(instances) == {"backend/a": b"2", "replica/a": b"old"}
    await old.commit(await old.claim_epoch(), change({"backend_a": b"3"}))


async def test_a_start_that_serves_takes_over_with_what_has_changed_meanwhile(instances: Instances) -> None:
    old = await instances.running("old", backend_a=b"1", backend_b=b"1", replica_a=b"old", parcel_a=b"p")
    new = await instances.new("new")
    epoch = await new.claim_epoch()
    await new.commit(epoch, change({"replica_a": b"new", "replica_n": b"new"}, must_last=False))
    await old.commit(1, change({"backend_a": b"2", "backend_b": None, "backend_c": b"1"}))
    await old.commit(1, change({"replica_a": b"older", "replica_o": b"old", "parcel_c": b"p"}))
    assert await take_over(new, epoch) == {
        "backend/a": b"2",
        "backend/b": None,
        "backend/c": b"1",
        "parcel/c": b"p",
    }
    assert new.ownership is StoreOwnership.HELD
    expected = {"backend/a": b"2", "backend/c": b"1", "replica/a": b"new", "replica/n": b"new"}
    assert await stored(instances) == {**expected, "parcel/a": b"p", "parcel/c": b"p"}
    assert await take_over(new, epoch) == {}, "it may be asked for again"
    with pytest.raises(StoreTakenError, match="accepts no changes"):
        await old.commit(1, change({"backend_a": b"3"}))
    await new.commit(epoch, change({"backend_a": b"4"}))
    assert (await stored(instances))["backend/a"] == b"4"


async def test_a_live_owner_keeps_the_store_until_everything_runs_elsewhere(instances: Instances) -> None:
    old = await instances.running("old", backend_a=b"1")
    new = await instances.new("new")
    epoch = await new.claim_epoch()
    for _ in range(5):
        assert await take_over(new, epoch, is_complete=False) is None
        await new.check()
        await old.check()
        instances.clock.at += PATIENCE_S / 2
        await new.check()
    await old.commit(1, change({"backend_a": b"2"}))
    assert await take_over(new, epoch) == {"backend/a": b"2"}


async def test_a_dead_owner_is_not_waited_for_long(instances: Instances) -> None:
    """A backend that cannot start must not prevent the return of the others."""
    await instances.running("old", backend_a=b"1")
    new = await instances.new("new")
    epoch = await new.claim_epoch()
    assert await take_over(new, epoch, is_complete=False) is None
    await new.check()
    instances.clock.at += PATIENCE_S
    await new.check()
    assert await take_over(new, epoch, is_complete=False) == {}
    assert new.ownership is StoreOwnership.HELD


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_store_without_an_owner_is_taken_at_once(is_new: bool, instances: Instances) -> None:
    if not is_new:
        old = await instances.running("old", backend_a=b"1")
        await old.release()
        assert old.ownership is StoreOwnership.RELEASED
    new = await instances.new("new")
    assert await take_over(new, await new.claim_epoch(), is_complete=False) == {}


async def test_a_release_during_a_trial_does_not_stop_it(instances: Instances) -> None:
    old = await instances.running("old", backend_a=b"1")
    new = await instances.new("new")
    await old.release()
    assert await take_over(new, await new.claim_epoch(), is_complete=False) == {}


async def test_a_new_controller_of_the_owner_does_not_stop_a_trial(instances: Instances) -> None:
    old = await instances.running("old", backend_a=b"1")
    new = await instances.new("new")
    epoch = await new.claim_epoch()
    await old.commit(await old.claim_epoch(), change({"backend_a": b"2"}))
    assert await take_over(new, epoch) == {"backend/a": b"2"}
    # Its own controllers keep their numbers, and the next one has a higher one.
    await new.commit(epoch, change({"backend_a": b"3"}))
    later = await new.claim_epoch()
    assert later > epoch
    with pytest.raises(StaleEpochError):
        await new.commit(epoch, change({"backend_a": b"4"}))
    await new.commit(later, change({"backend_a": b"5"}))


async def test_controllers_that_die_during_a_trial_leave_it_going_on(instances: Instances) -> None:
    old = await instances.running("old", backend_a=b"1")
    new = await instances.new("new")
    epochs = [await new.claim_epoch() for _ in range(5)]
    assert epochs == sorted(set(epochs))
    await new.commit(epochs[-1], change({"replica_a": b"new"}, must_last=False))
    with pytest.raises(StaleEpochError):
        await take_over(new, epochs[0])
    assert await take_over(new, epochs[-1]) == {}
    assert await new.shared.newest_epoch() >= epochs[-1]
    with pytest.raises(StoreTakenError):
        await old.commit(1, change({"backend_a": b"2"}))


# ---- two starts at once


@pytest.mark.parametrize("has_owner", [True, False])
async def test_of_two_starts_at_once_one_wins_and_the_other_fails(
    has_owner: bool, instances: Instances
) -> None:
    if has_owner:
        await instances.running("old", backend_a=b"1")
    stores = [await instances.new(name) for name in ("one", "two", "three")]
    epochs = [await store.claim_epoch() for store in stores]

    async def until_decided(store: OwnedStore, epoch: int) -> bool:
        try:
            while await take_over(store, epoch) is None:
                pass
        except StoreTakenError:
            return False
        return True

    outcomes = await asyncio.gather(*map(until_decided, stores, epochs))
    assert sorted(outcomes) == [False, False, True]
    for store, epoch, has_won in zip(stores, epochs, outcomes, strict=True):
        assert store.ownership is (StoreOwnership.HELD if has_won else StoreOwnership.REFUSED)
        if has_won:
            await store.commit(epoch, change({"backend_w": b"1"}))
            continue
        with pytest.raises(StoreTakenError):
            await store.commit(epoch, change({"backend_l": b"1"}))
        await asyncio.wait_for(store.watch(), 5)  # it returns, and the instance is ended
        await store.release(gives_back=True)
    winner = stores[outcomes.index(True)]
    await winner.check()
    assert winner.ownership is StoreOwnership.HELD
    assert "backend/l" not in await stored(instances)


# ---- an instance that was overtaken


async def _overtaken(instances: Instances) -> tuple[OwnedStore, OwnedStore]:
    old = await instances.running("old", backend_a=b"1", replica_a=b"old", parcel_a=b"p")
    new = await instances.new("new")
    epoch = await new.claim_epoch()
    await new.commit(epoch, change({"replica_a": b"new"}, must_last=False))
    await take_over(new, epoch)
    return old, new


@pytest.mark.parametrize("notices", ["looks", "commits", "loads", "loses its controller"])
async def test_an_instance_that_was_overtaken_continues_from_its_own_records(
    notices: str, instances: Instances
) -> None:
    old, new = await _overtaken(instances)
    epoch = 1
    if notices == "looks":
        await old.check()
    elif notices == "loads":
        assert (await old.load())["replica/a"] == b"old"
    elif notices == "loses its controller":
        epoch = await old.claim_epoch()
        assert epoch > 1
    await old.commit(epoch, change({"replica_b": b"old"}, must_last=False))
    assert old.ownership is StoreOwnership.TAKEN
    assert "Another cluster" in old.problems()["store"]
    with pytest.raises(StoreTakenError):
        await old.commit(epoch, change({"backend_a": b"2"}))
    with pytest.raises(StoreTakenError):
        await old.rewrite(epoch, change({"backend_a": b"2"}))
    with pytest.raises(StoreTakenError):
        await take_over(old, epoch)
    await new.commit(2, change({"backend_a": None, "parcel_a": None}))
    later = await old.claim_epoch()
    assert later > epoch
    records = {"backend/a": b"1", "replica/a": b"old", "replica/b": b"old", "parcel/a": b"p"}
    assert await old.load() == records
    await new.check()
    assert new.ownership is StoreOwnership.HELD
    assert await stored(instances) == {"replica/a": b"new"}
    await old.release()
    assert (await new.shared.newest_claim()).owner == "new.1", "its end changes nothing"


async def test_a_start_that_fails_after_it_has_taken_over_gives_the_store_back(instances: Instances) -> None:
    old, new = await _overtaken(instances)
    await old.check()
    # While another instance owned the store, it replaced a replica and had new controllers.
    for _ in range(4):
        epoch = await old.claim_epoch()
    await old.commit(epoch, change({"replica_a": b"replaced"}, must_last=False))
    await new.release(gives_back=True)
    await old.check()
    assert old.ownership is StoreOwnership.HELD
    assert "store" not in old.problems()
    records = {"backend/a": b"1", "replica/a": b"replaced", "parcel/a": b"p"}
    assert await stored(instances) == records
    await old.commit(epoch, change({"backend_a": b"2"}))
    assert await old.claim_epoch() > epoch
    assert await old.load() == {**records, "backend/a": b"2"}


async def test_an_instance_that_did_not_notice_has_its_store_back_with_the_next_change(
    instances: Instances,
) -> None:
    old, new = await _overtaken(instances)
    await new.release(gives_back=True)
    await old.commit(1, change({"backend_a": b"2"}))
    assert await stored(instances) == {"backend/a": b"2", "replica/a": b"old", "parcel/a": b"p"}


async def test_the_store_of_a_dead_instance_has_no_owner_again(instances: Instances) -> None:
    _, new = await _overtaken(instances)
    await new.release(gives_back=True)
    third = await instances.new("third")
    epoch = await third.claim_epoch()
    assert await take_over(third, epoch) == {}


# ---- another scheduler


async def test_an_instance_that_comes_back_has_its_store_at_once(instances: Instances) -> None:
    await instances.running("old", backend_a=b"1")
    back = OwnedStore(instances._make(), "old.2", instances.clock)
    instances.opened.append(back)
    await back.open()
    await back.begin(reconnects=True, epoch=1, records={"backend/a": b"known"})
    assert back.ownership is StoreOwnership.HELD
    epoch = await back.claim_epoch()
    assert await back.load() == {"backend/a": b"1"}
    await back.commit(epoch, change({"backend_a": b"2"}))


@pytest.mark.parametrize("knows", [True, False])
async def test_an_instance_that_comes_back_does_not_take_the_store_from_another(
    knows: bool, instances: Instances
) -> None:
    _, new = await _overtaken(instances)
    back = OwnedStore(instances._make(), "old.2", instances.clock)
    instances.opened.append(back)
    await back.open()
    known = {"backend/a": b"1", "replica/a": b"old"} if knows else None
    await back.begin(reconnects=True, epoch=9, records=known)
    assert back.ownership is StoreOwnership.TAKEN
    epoch = await back.claim_epoch()
    assert epoch == 10
    await back.commit(epoch, change({"replica_b": b"old"}, must_last=False))
    here = known or {"backend/a": b"1", "replica/a": b"new"}
    assert await back.load() == {**here, "replica/b": b"old", "parcel/a": b"p"}
    await new.check()
    assert new.ownership is StoreOwnership.HELD


async def test_a_failed_write_is_a_problem_until_one_succeeds(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await instances.running("old", backend_a=b"1")

    async def fail(*_: Any) -> None:
        raise StoreUnavailableError("The disk is full.")

    monkeypatch.setattr(store.shared, "commit", fail)
    with pytest.raises(StoreUnavailableError):
        await store.commit(1, change({"backend_a": b"2"}))
    assert store.problems() == {"store": "The last change could not be written. The disk is full."}
    monkeypatch.undo()
    await store.commit(1, change({"backend_a": b"2"}))
    assert store.problems() == {}


# ---- claims


@pytest.mark.parametrize("make", DURABLE, indirect=True)
async def test_of_two_claims_after_one_epoch_one_succeeds(instances: Instances) -> None:
    one, two = [(await instances.new(name)).shared for name in ("one", "two")]
    assert await one.newest_claim() == Claim(0, None)
    claims = await asyncio.gather(
        one.claim_epoch(0, "one"), two.claim_epoch(0, "two"), return_exceptions=True
    )
    assert sorted(map(str, claims)) == ["1", "Epoch 0 is no longer the newest; epoch 1 is."]
    winner = "one" if claims[0] == 1 else "two"
    assert await one.newest_claim() == await two.newest_claim() == Claim(1, winner)
    with pytest.raises(StaleEpochError):
        await one.claim_epoch(7, "one")
    assert await two.claim_epoch() == 2
    assert await one.newest_claim() == Claim(2, "")


@pytest.mark.parametrize("make", DURABLE, indirect=True)
async def test_knocks_are_answered_and_forgotten(instances: Instances) -> None:
    one, two = [(await instances.new(name)).shared for name in ("one", "two")]
    await one.claim_epoch(0, "one")
    assert not await two.query_owner("two")
    assert not await two.query_owner("two")
    await one.newest_claim()
    assert not await two.query_owner("two")
    assert await one.newest_claim(answers=True) == Claim(1, "one")
    assert await two.query_owner("two")
    await two.forget_query("two")
    await two.forget_query("two")
    assert not await two.query_owner("two")


# ---- kills


@asynccontextmanager
async def _opened(store: OwnedStore, **begun: Any) -> AsyncIterator[OwnedStore]:
    await store.open()
    try:
        await store.begin(**begun)
        yield store
    finally:
        await store.close()


@pytest.mark.parametrize("kind", ["folder", pytest.param("sqlite", marks=pytest.mark.nightly)])
def test_a_start_that_is_killed_at_any_moment_leaves_an_instance_that_continues(
    kind: str, tmp_path: Path
) -> None:
    """The next start finds all changes that were acknowledged before."""
    # The step after which the new instance has claimed the store.
    claims = {"folder": "list snapshot", "sqlite": "after INSERT INTO daskserve_owners"}

    def run(at: int) -> bool:
        path = tmp_path / str(at)
        path.mkdir()
        trap = Trap(at)
        clock = HandClock()
        make = place(kind, path)

        async def main() -> None:
            async with _opened(OwnedStore(cast("Any", make("i")), "old.1", clock)) as old:
                epoch = await old.claim_epoch()
                await take_over(old, epoch)
                await old.commit(epoch, change({"backend_a": b"1", "replica_a": b"old"}))
                with trapped_sqlite(trap):
                    trapped = folder_store(path, lambda folder: TrappedFolder(folder, trap))
                    killed = make("i") if kind == "sqlite" else trapped
                    await _start_and_die(OwnedStore(cast("Any", killed), "new.1", clock))
                await old.check()
                # The old instance owns the store, or continues without it.
                epoch = await old.claim_epoch()
                await old.commit(epoch, change({"replica_b": b"old"}, must_last=False))
                assert await old.load() == {"backend/a": b"1", "replica/a": b"old", "replica/b": b"old"}
                if old.ownership is StoreOwnership.HELD:
                    await old.commit(epoch, change({"backend_a": b"2"}))
                else:
                    assert old.ownership is StoreOwnership.TAKEN
                    assert claims[kind] in " ".join(trap.steps), "it had claimed, and so it served"
            async with _opened(OwnedStore(cast("Any", make("i")), "next.1", clock)) as later:
                await take_over(later, await later.claim_epoch())
                assert (await later.load())["backend/a"] == (
                    b"2" if old.ownership is StoreOwnership.HELD else b"1"
                )

        asyncio.run(main())
        return trap.has_sprung

    assert every_step(run) > 12


async def _start_and_die(store: OwnedStore) -> None:
    try:
        await store.open()
        await store.begin()
        epoch = await store.claim_epoch()
        await store.commit(epoch, change({"replica_a": b"new"}, must_last=False))
        await store.check()
        assert await take_over(store, epoch) == {}
        await store.commit(epoch, change({"replica_n": b"new"}, must_last=False))
        await store.release(gives_back=True)
    except Crash:
        pass
    finally:
        try:
            await store.close()
        except Crash:
            pass
