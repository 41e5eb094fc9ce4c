"""The journal in a folder: crashes, races and damage at every step, and the cost of a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_harness import (
    Crash,
    Trap,
    TrappedFolder,
    blocking,
    commit,
    compact,
    every_step,
    folder_store,
    local_folder,
    make_bucket,
    make_renaming_files,
    opened,
    positions,
    remote,
    settle,
    threaded,
)

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store import fsspec as store_fsspec
from daskserve.cluster.store import journal as store_journal
from daskserve.cluster.store.folders import Folder
from daskserve.cluster.store.fsspec import folder_of
from daskserve.cluster.store.opening import StoreUnavailableError, open_store
from daskserve.cluster.store.thread import BlockingCalls, ThreadedStore
from daskserve.errors import StaleEpochError

#: A step that no test reaches.
NEVER = 1_000_000
#: Makes another store of the same instance at the same location, with a trap in front of its folder.
MakeTrapped = Callable[..., ThreadedStore]


@pytest.fixture(params=["folder", "bucket", "renames"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], MakeTrapped]:
    """Return a factory that makes fresh locations by name."""

    def fresh(name: str) -> MakeTrapped:
        if request.param == "folder":
            path = tmp_path / name
            path.mkdir()
            return lambda wrap=lambda folder: folder: folder_store(path, wrap)
        connect = remote(make_bucket() if request.param == "bucket" else make_renaming_files())

        def make(wrap: Callable[[Folder], Folder] = lambda folder: folder) -> ThreadedStore:
            return threaded("there://store", "i", lambda url, folder: wrap(connect(url, folder)))

        return make

    return fresh


@pytest.fixture
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_journal, "COMPACT_OBJECTS", 4)
    monkeypatch.setattr(store_fsspec, "REMOVE_AT_ONCE", 2)


def change(**records: bytes | None) -> StoreChange:
    return StoreChange(records)


def names(path: Path, folder: str) -> list[str]:
    return sorted(local_folder(path).names(folder))


# ---- by URL


async def test_records_in_a_folder_survive_the_store_object(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/store", f"local://{tmp_path}/store/"):
        async with opened(open_store(url, "my/app")) as store:
            epoch = await store.claim_epoch()
            found = await commit(store, epoch, **{f"k{epoch}": b""})
    assert sorted(found) == ["k1", "k2"]
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["my=2Fapp"]


def test_the_folder_of_an_instance_is_one_path_segment() -> None:
    for instance in ["a", "A b", "..", ".", "", "=", "%3D", "a/../b", "ü*?[x]", "x\x00\n"]:
        name = folder_of(instance)
        assert name, instance
        assert not set(name) & set("/.%*?[]\\\0\n"), instance
        assert folder_of(instance) != folder_of(instance + "x"), instance
        assert folder_of(name) != name or instance == name, instance


# ---- the process crashes at each step


def test_a_crash_during_a_commit_loses_no_acknowledged_commit(
    places: Callable[[str], MakeTrapped],
) -> None:
    def run(at: int) -> bool:
        make = places(str(at))
        trap = Trap(NEVER)

        async def scenario() -> None:
            async with opened(make(lambda folder: TrappedFolder(folder, trap))) as store:
                await store.commit(1, change(a=b"1", b=b"1"))
                await store.commit(1, change(c=b"2"))
                trap.at, trap.steps = at, []
                try:
                    await store.commit(1, change(a=b"3", b=None, d=b"3"))
                except Crash:
                    pass
            async with opened(make()) as store:
                before = {"a": b"1", "b": b"1", "c": b"2"}
                after = {"a": b"3", "c": b"2", "d": b"3"}
                found = await store.load()
                assert found == (after if f"after txn/{'1':0>8}-{'3':0>10}" in trap.steps else before)
                assert store.problems() == {}
                assert await store.claim_epoch() == 2
                assert await commit(store, 2, e=b"4") == {**found, "e": b"4"}
            async with opened(make()) as store:
                assert await store.load() == {**found, "e": b"4"}

        asyncio.run(scenario())
        return trap.has_sprung

    # Check the epoch, look for the head, before and after creating the object, check the epoch again.
    assert every_step(run) == 5


def test_epochs_increase_after_a_crash_during_a_claim(places: Callable[[str], MakeTrapped]) -> None:
    def run(at: int) -> bool:
        make = places(str(at))
        trap = Trap(NEVER)

        async def scenario() -> None:
            async with opened(make(lambda folder: TrappedFolder(folder, trap))) as store:
                assert await store.claim_epoch() == 1
                await store.commit(1, change(a=b"1"))
                trap.at, trap.steps = at, []
                try:
                    await store.claim_epoch()
                except Crash:
                    pass
            async with opened(make()) as store:
                # Once the new epoch may have been returned, the old one is fenced. No epoch repeats.
                assert await store.newest_epoch() == (2 if f"after epoch/{'2':0>8}" in trap.steps else 1)
                assert await store.claim_epoch() in (2, 3)
                assert await store.load() == {"a": b"1"}

        asyncio.run(scenario())
        return trap.has_sprung

    assert every_step(run) >= 6


@pytest.mark.usefixtures("short_journals")
def test_a_crash_during_compaction_loses_nothing(
    places: Callable[[str], MakeTrapped],
) -> None:
    def run(at: int) -> bool:
        make = places(str(at))
        trap = Trap(NEVER)

        async def scenario() -> None:
            model: dict[str, bytes] = {}
            async with opened(make(lambda folder: TrappedFolder(folder, trap))) as store:
                for number in range(8):
                    model[f"k{number}"] = model["last"] = b"%d" % number
                    await store.commit(1, change(**{f"k{number}": b"%d" % number, "last": b"%d" % number}))
                await compact(store)
                await settle(store)
                model["more"] = b""
                await store.commit(1, change(more=b""))
                trap.at, trap.steps = at, []
                try:
                    await compact(store)
                    await settle(store)
                except Crash:
                    pass
            # The reopened store continues and compacts the journal without a crash.
            for _ in range(2):
                async with opened(make()) as store:
                    assert await store.load() == model
                    assert store.problems() == {}
                    for number in range(7):
                        model[f"l{number}"] = b""
                        await store.commit(1, change(**{f"l{number}": b""}))
                        await settle(store)
                    assert len(await positions(store, "txn")) < 20
                    assert len(await positions(store, "snapshot")) <= 3

        asyncio.run(scenario())
        return trap.has_sprung

    # Before and after the snapshot, its read-back, two listings, the removal of a snapshot and three changes.
    assert every_step(run) == 9


# ---- each step fails, and the process goes on


@pytest.mark.parametrize("error", [ConnectionError("down"), PermissionError("no"), RuntimeError("foreign")])
def test_a_failed_commit_is_void_once_the_next_one_succeeds(
    places: Callable[[str], MakeTrapped], error: Exception
) -> None:
    def run(at: int) -> bool:
        make = places(str(at))

        def fail() -> None:
            raise error

        trap = Trap(NEVER, fail)

        async def scenario() -> None:
            async with opened(make(lambda folder: TrappedFolder(folder, trap))) as store:
                assert await store.claim_epoch() == 1
                await store.commit(1, change(a=b"1"))
                trap.at, trap.steps = at, []
                if at < 5:
                    with pytest.raises(Exception, match=type(error).__name__):
                        await store.commit(1, change(a=b"2", b=b"2"))
                assert await commit(store, 1, c=b"3") == {"a": b"1", "c": b"3"}
                assert await store.claim_epoch() == 2
                assert await commit(store, 2) == {"a": b"1", "c": b"3"}
            async with opened(make()) as store:
                assert await store.load() == {"a": b"1", "c": b"3"}

        if at < 5:
            asyncio.run(scenario())
        return trap.has_sprung

    assert every_step(run) == 5


async def test_the_store_works_again_after_an_outage(tmp_path: Path) -> None:
    is_down = False

    class Line(TrappedFolder):
        def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
            if is_down:
                raise ConnectionError("the line is down")
            super().create(name, data)

        def remove(self, names: Sequence[str]) -> None:
            if is_down:
                raise ConnectionError("the line is down")
            super().remove(names)

    async with opened(folder_store(tmp_path, lambda folder: Line(folder, Trap(NEVER)))) as store:
        await store.commit(1, change(a=b"1"))
        is_down = True
        for attempt in (store.commit(1, change(a=b"2")), store.claim_epoch(), store.forget_query("me")):
            with pytest.raises(StoreUnavailableError, match="ConnectionError: the line is down") as failure:
                await attempt
            assert failure.value.is_retryable
        assert await store.load() == {"a": b"1"}
        is_down = False
        assert await commit(store, 1, a=b"3") == {"a": b"3"}


# ---- another process intervenes at each step


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_overtaken_commit_is_seen_by_the_next_controller_or_refused(
    places: Callable[[str], MakeTrapped], is_loaded: bool
) -> None:
    """The new controller takes over at each step of the old one's commit; both agree on the outcome."""

    def run(at: int) -> bool:
        make = places(str(at))
        seen: list[Mapping[str, bytes]] = []

        def take_over() -> None:
            new.claim_epoch()
            if is_loaded:
                seen.append(new.load())

        trap = Trap(NEVER, take_over)
        old, new = blocking(make(lambda folder: TrappedFolder(folder, trap))), blocking(make())
        for store in (old, new):
            store.open()
        epoch = old.claim_epoch()
        old.load()
        old.commit(epoch, {"a": b"1"})
        trap.at, trap.steps = at, []
        try:
            old.commit(epoch, {"a": b"2", "b": b"2"})
            is_acknowledged = True
        except StaleEpochError:
            is_acknowledged = False
        if trap.has_sprung:
            assert not is_acknowledged
            if not seen:
                seen.append(new.load())
            new.commit(epoch + 1, {"c": b"3"})
            expected = {**seen[0], "c": b"3"}
            with pytest.raises(StaleEpochError):
                old.commit(epoch, {"d": b"4"})
        else:
            expected = {"a": b"2", "b": b"2"}
        assert new.load() == expected
        reader = blocking(make())
        reader.open()
        assert reader.load() == expected
        for store in (old, new, reader):
            store.close()
        return trap.has_sprung

    assert every_step(run) == 5


def test_later_claimants_see_every_acknowledged_commit(
    places: Callable[[str], MakeTrapped],
) -> None:
    def run(at: int) -> bool:
        make = places(str(at))

        def write() -> None:
            try:
                old.commit(1, {"late": b"1"})
                acknowledged.append(True)
            except StaleEpochError:
                pass

        acknowledged: list[bool] = []
        trap = Trap(NEVER, write)
        old, new = blocking(make()), blocking(make(lambda folder: TrappedFolder(folder, trap)))
        for store in (old, new):
            store.open()
        old.claim_epoch()
        old.commit(1, {"a": b"1"})
        trap.at, trap.steps = at, []
        claimed = new.claim_epoch()
        loaded = new.load()
        assert claimed == 2
        assert loaded.get("late", b"") == (b"1" if acknowledged else b"")
        new.commit(2, {"b": b"2"})
        assert new.load() == {**loaded, "b": b"2"}
        for store in (old, new):
            store.close()
        return trap.has_sprung

    assert every_step(run) >= 8


@pytest.mark.parametrize("times", [1, 2])
def test_two_concurrent_claims_get_different_epochs(places: Callable[[str], MakeTrapped], times: int) -> None:
    def run(at: int) -> bool:
        make = places(str(at))
        claimed: list[int] = []
        trap = Trap(NEVER, lambda: claimed.extend(two.claim_epoch() for _ in range(times)))
        one, two = blocking(make(lambda folder: TrappedFolder(folder, trap))), blocking(make())
        for store in (one, two):
            store.open()
        trap.at, trap.steps = at, []
        claimed.append(one.claim_epoch())
        has_sprung, trap.at = trap.has_sprung, NEVER
        assert len(set(claimed)) == len(claimed)
        assert one.newest_epoch() == two.newest_epoch() == max(claimed)
        winner, loser = (one, two) if claimed[-1] == max(claimed) else (two, one)
        winner.commit(max(claimed), {"a": b"1"})
        if has_sprung:
            with pytest.raises(StaleEpochError):
                loser.commit(min(claimed), {"a": b"2"})
        for store in (one, two):
            assert store.load() == {"a": b"1"}
            store.close()
        return has_sprung

    assert every_step(run) >= 5


def test_a_load_during_another_process_compaction_sees_everything(
    places: Callable[[str], MakeTrapped], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockingCalls, "is_open", True)

    def run(at: int) -> bool:
        make = places(str(at))
        model = {f"k{number}": b"" for number in range(9)}

        def cut() -> None:
            for number in (7, 8):
                writer.commit(1, {f"k{number}": b""})
                writer.compact(True)

        trap = Trap(NEVER, cut)
        writer, reader = blocking(make()), blocking(make(lambda folder: TrappedFolder(folder, trap)))
        for store in (writer, reader):
            store.open()
        for number in range(7):
            writer.commit(1, {f"k{number}": b""})
            if number == 3:
                writer.compact(True)
        trap.at, trap.steps = at, []
        found = reader.load()
        assert found.items() <= model.items()
        assert {f"k{number}" for number in range(7)} <= set(found)
        assert reader.problems.found == {}
        for store in (writer, reader):
            store.close()
        return trap.has_sprung

    assert every_step(run) >= 5


# ---- damage


def damage(path: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    file = path / "store" / "i" / name
    file.write_bytes(edit(file.read_bytes()))


async def journal_of(path: Path, count: int, *, snapshots: tuple[int, ...] = ()) -> dict[str, bytes]:

    async with opened(folder_store(path)) as store:
        for number in range(1, count + 1):
            await store.commit(1, change(**{f"k{number}": b"%d" % number * 50}))
            if number in snapshots:
                await compact(store)
                await settle(store)
    return {f"k{number}": b"%d" % number * 50 for number in range(1, count + 1)}


async def reopened(path: Path) -> tuple[Mapping[str, bytes], Mapping[str, str]]:

    async with opened(folder_store(path)) as store:
        return await store.load(), store.problems()


def without(records: Mapping[str, bytes], *keys: str) -> dict[str, bytes]:
    return {key: value for key, value in records.items() if key not in keys}


TORN = "txn/00000001-0000000005"


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
async def test_a_torn_last_change_loses_no_earlier_change(tmp_path: Path, cut: int) -> None:
    records = await journal_of(tmp_path, 5)
    damage(tmp_path, TORN, lambda data: data[:cut])
    found, problems = await reopened(tmp_path)
    assert found == without(records, "k5")
    assert list(problems) == [TORN]
    assert "cut off and never acknowledged" in problems[TORN]

    async with opened(folder_store(tmp_path)) as store:
        assert await commit(store, 1, k6=b"6") == {**without(records, "k5"), "k6": b"6"}
    found, problems = await reopened(tmp_path)
    assert found == {**without(records, "k5"), "k6": b"6"}
    assert "aside/txn=00000001-0000000005" in problems[TORN]


async def test_a_torn_change_completed_later_stays_void(tmp_path: Path) -> None:
    """The writer was slow, not dead, on a file system where objects do not appear atomically."""
    await journal_of(tmp_path, 5)
    file = tmp_path / "store" / "i" / TORN
    whole = file.read_bytes()
    file.write_bytes(whole[:30])

    async with opened(folder_store(tmp_path)) as store:
        await store.claim_epoch()
        await store.load()
        expected = await commit(store, 2, k6=b"6")
    file.write_bytes(whole)
    assert (await reopened(tmp_path))[0] == expected


async def test_a_damaged_change_is_reported_and_kept_aside_and_loses_only_itself(tmp_path: Path) -> None:
    records = await journal_of(tmp_path, 5)
    name = "txn/00000001-0000000002"
    damage(tmp_path, name, lambda data: data.replace(b"2222", b"2?22"))
    damaged = (tmp_path / "store" / "i" / name).read_bytes()
    for _ in range(2):
        found, problems = await reopened(tmp_path)
        assert found == without(records, "k2")
        assert list(problems) == [name]
        assert "never acknowledged" not in problems[name]

    async with opened(folder_store(tmp_path)) as store:
        for number in (6, 7):
            await store.commit(1, change(**{f"k{number}": b""}))
            await compact(store)
            await settle(store)
    assert names(tmp_path, "txn") == ["00000001-0000000007"]
    found, problems = await reopened(tmp_path)
    assert found == {**without(records, "k2"), "k6": b"", "k7": b""}
    assert list(problems) == [name]
    assert (tmp_path / "store" / "i" / "aside" / name.replace("/", "=")).read_bytes() == damaged


@pytest.mark.parametrize(
    "edit", [lambda data: b"", lambda data: data[:-9], lambda data: data.replace(b"3", b"?", 1)]
)
async def test_a_damaged_snapshot_loses_nothing(tmp_path: Path, edit: Callable[[bytes], bytes]) -> None:
    records = await journal_of(tmp_path, 9, snapshots=(3, 6))
    assert names(tmp_path, "snapshot") == ["00000001-0000000003", "00000001-0000000006"]
    assert names(tmp_path, "txn")[0] == "00000001-0000000004"
    damage(tmp_path, "snapshot/00000001-0000000006", edit)
    found, problems = await reopened(tmp_path)
    assert found == records
    assert list(problems) == ["snapshot/00000001-0000000006"]


async def test_the_readable_part_of_the_only_snapshot_is_used(tmp_path: Path) -> None:
    records = await journal_of(tmp_path, 9, snapshots=(3, 6))
    (tmp_path / "store" / "i" / "snapshot" / "00000001-0000000003").unlink()
    damage(tmp_path, "snapshot/00000001-0000000006", lambda data: data.replace(b"2222", b"2?22", 1))
    found, problems = await reopened(tmp_path)
    assert found == without(records, "k2")
    assert "unreadable: 'k2'" in problems["snapshot/00000001-0000000006"]

    async with opened(folder_store(tmp_path)) as store:
        for _ in range(2):
            assert await commit(store, 1, new=b"") == {**without(records, "k2"), "new": b""}
            await compact(store)
            await settle(store)
    assert (await reopened(tmp_path))[0] == {**without(records, "k2"), "new": b""}


async def test_unknown_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    records = await journal_of(tmp_path, 2)
    root = tmp_path / "store" / "i"
    for folder in ("txn", "epoch", "snapshot", "format"):
        (root / folder / ".DS_Store").write_bytes(b"?")
        (root / folder / "notes.txt").write_bytes(b"?")
    assert await reopened(tmp_path) == (records, {})


async def test_epochs_increase_even_if_their_objects_are_lost(tmp_path: Path) -> None:
    records = await journal_of(tmp_path, 2)
    async with opened(folder_store(tmp_path)) as store:
        await store.claim_epoch()
        await store.commit(2, change(k3=b"3"))
    for name in names(tmp_path, "epoch"):
        (tmp_path / "store" / "i" / "epoch" / name).unlink()
    async with opened(folder_store(tmp_path)) as store:
        with pytest.raises(StaleEpochError):
            await store.commit(1, change(k4=b"4"))
    async with opened(folder_store(tmp_path)) as store:
        assert await store.claim_epoch() == 3
        assert await store.load() == {**records, "k3": b"3"}


# ---- the event loop, and cost


async def test_slow_storage_does_not_block_the_event_loop(tmp_path: Path) -> None:
    is_released = threading.Event()

    class Slow(TrappedFolder):
        def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
            if name.startswith("txn/"):
                assert is_released.wait(10), "the loop was blocked"
            super().create(name, data)

    async with opened(folder_store(tmp_path, lambda folder: Slow(folder, Trap(NEVER)))) as store:
        asyncio.get_running_loop().call_later(0.01, is_released.set)
        assert await commit(store, 1, a=b"1") == {"a": b"1"}


async def test_hanging_storage_does_not_block_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("daskserve.cluster.store.thread.CLOSE_GRACE_S", 0.02)
    is_released = threading.Event()

    class Hanging(TrappedFolder):
        def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
            if name.startswith("txn/"):
                is_released.wait(10)
            super().create(name, data)

    store = folder_store(tmp_path, lambda folder: Hanging(folder, Trap(NEVER)))
    await store.open()
    late = asyncio.create_task(store.commit(1, change(a=b"1")))
    await asyncio.sleep(0)
    await store.close()
    assert "did not close within 0.02 s" in caplog.text
    assert not late.done()
    is_released.set()
    await late


class Counting(TrappedFolder):
    """A folder that counts writes."""

    def __init__(self, inner: Folder) -> None:
        super().__init__(inner, Trap(NEVER))
        self.written: list[tuple[str, int]] = []

    def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
        super().create(name, data)
        self.written.append((name.partition("/")[0], len(data)))


def backend(number: int) -> dict[str, bytes | None]:
    return {f"backend/b{number:04d}": b"x" * 500, f"replica/b{number:04d}#0": b"y" * 200}


async def test_the_cost_of_a_commit_does_not_grow_with_the_records(tmp_path: Path) -> None:
    folders: list[Counting] = []

    def count(folder: Folder) -> Folder:
        folders.append(Counting(folder))
        return folders[-1]

    async with opened(folder_store(tmp_path, count)) as store:
        written = folders[0].written

        async def cost(number: int) -> list[tuple[str, int]]:
            written.clear()
            await store.commit(1, StoreChange(backend(number)))
            return list(written)

        await store.commit(1, StoreChange({}))
        early = await cost(10)
        most = [backend(number) for number in range(11, 1000)]
        await store.commit(1, StoreChange({key: value for each in most for key, value in each.items()}))
        late = await cost(1000)
    assert [kind for kind, _ in early] == [kind for kind, _ in late] == ["txn"]
    assert abs(late[0][1] - early[0][1]) <= 8


async def test_compaction_costs_in_proportion_to_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_journal, "COMPACT_BYTES", 2_000)
    monkeypatch.setattr(store_journal, "COMPACT_OBJECTS", 1_000)
    folders: list[Counting] = []

    def count(folder: Folder) -> Folder:
        folders.append(Counting(folder))
        return folders[-1]

    async with opened(folder_store(tmp_path, count)) as store:
        for number in range(200):
            await store.commit(1, StoreChange({f"k{number}": b"x" * 100}))
        await settle(store)
        left = len(await positions(store, "txn"))
    written = folders[0].written
    sizes = {kind: sum(size for each, size in written if each == kind) for kind in ("txn", "snapshot")}
    assert 2 <= sum(kind == "snapshot" for kind, _ in written) <= 10
    assert sizes["snapshot"] <= sizes["txn"]
    assert left < 200
    assert len((await reopened(tmp_path))[0]) == 200


@pytest.mark.usefixtures("short_journals")
async def test_commits_succeed_while_compaction_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoSnapshots(TrappedFolder):
        def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
            if name.startswith("snapshot/"):
                raise ConnectionError("no snapshots today")
            super().create(name, data)

    async with opened(folder_store(tmp_path, lambda folder: NoSnapshots(folder, Trap(NEVER)))) as store:
        for number in range(12):
            await store.commit(1, change(**{f"k{number}": b""}))
            await settle(store)
    assert len((await reopened(tmp_path))[0]) == 12
    # A failed compaction is not retried on every commit.
    assert caplog.text.count("no snapshots today") in range(1, 12)


async def test_the_tracked_state_size_is_exact(tmp_path: Path) -> None:
    async with opened(folder_store(tmp_path)) as store:
        records: Any
        for records in ({"a": b"123", "b": b"1"}, {"a": b"12", "c": b""}, {"b": None, "x": None}):
            await store.commit(1, StoreChange(records))
        journal = blocking(store)._journal
        assert journal is not None
        assert journal.state_size == sum(len(key) + len(value) for key, value in journal.records.items())
        assert journal.objects == 3
