"""Stores whose file or folder is removed, moved or replaced while they are in use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from store_harness import DURABLE, MakeStore, commit, compact, make_bucket, opened, place, remote, threaded

from daskserve.cluster.protocols.base import InstanceStore, StoreChange
from daskserve.cluster.store.opening import StoreError, open_store
from daskserve.errors import StaleEpochError, StoreLostError


@pytest.fixture(params=["sqlite", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    return place(request.param, tmp_path)


def moved_away(path: Path) -> None:
    """Move the store's files to ``path/away``."""
    away = path / "away"
    away.mkdir()
    for each in sorted(path.glob("store*")):
        each.rename(away / each.name)


def removed(path: Path) -> None:
    moved_away(path)
    shutil.rmtree(path / "away")


def replaced(path: Path) -> None:
    """Replace the store's files by a copy."""
    moved_away(path)
    shutil.copytree(path / "away", path, dirs_exist_ok=True)


async def reread(make: MakeStore) -> Mapping[str, bytes]:
    """Return the records that the next start would find."""
    async with opened(make("i")) as store:
        return await store.load()


async def refused(store: InstanceStore) -> None:
    with pytest.raises(StoreLostError, match=r"removed|moved|replaced|another file|is missing"):
        await commit(store, await store.newest_epoch(), late=b"1")
    assert "rewrite_store" in store.problems()["store"]


@pytest.mark.parametrize("lose", [moved_away, removed])
async def test_a_change_is_refused_while_the_store_is_not_in_its_place(
    make: MakeStore, lose: Callable[[Path], None], tmp_path: Path
) -> None:
    async with opened(make("i")) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1")
        lose(tmp_path)
        await refused(store)
        assert (await store.load())["a"] == b"1"


async def test_a_store_that_is_put_back_takes_changes_again(make: MakeStore, tmp_path: Path) -> None:
    async with opened(make("i")) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1")
        moved_away(tmp_path)
        await refused(store)
        for each in (tmp_path / "away").iterdir():
            each.rename(tmp_path / each.name)
        await commit(store, epoch, b=b"2")
        assert store.problems() == {}
    assert await reread(make) == {"a": b"1", "b": b"2"}


async def test_a_copy_of_the_file_is_another_file(tmp_path: Path) -> None:
    make = place("sqlite", tmp_path)
    async with opened(make("i")) as store:
        await commit(store, await store.claim_epoch(), a=b"1")
        replaced(tmp_path)
        await refused(store)


async def test_a_log_that_is_removed_is_noticed(tmp_path: Path) -> None:
    """No other file has its changes yet."""
    async with opened(place("sqlite", tmp_path)("i")) as store:
        await commit(store, await store.claim_epoch(), a=b"1")
        (tmp_path / "store.db-wal").unlink()
        await refused(store)


async def test_a_journal_whose_head_is_gone_takes_no_changes(tmp_path: Path) -> None:
    make = place("folder", tmp_path)
    async with opened(make("i")) as store:
        await commit(store, await store.claim_epoch(), a=b"1")
        for each in (tmp_path / "store" / "i" / "txn").iterdir():
            each.unlink()
        await refused(store)


async def test_a_bucket_that_is_emptied_takes_no_changes(caplog: pytest.LogCaptureFixture) -> None:
    files = make_bucket()
    async with opened(threaded("bucket://store", "i", remote(files))) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1")
        type(files).store.clear()
        await refused(store)
        assert "The records of instance i in store bucket://store are lost: " in caplog.text
        await store.rewrite(epoch, StoreChange({"a": b"1"}))
    assert await reread(lambda instance: threaded("bucket://store", instance, remote(files))) == {"a": b"1"}


async def test_changes_of_the_controller_itself_continue_without_a_store(
    make: MakeStore, tmp_path: Path
) -> None:
    """Replicas that die are replaced, and a new controller finds the records of the old one."""
    async with opened(make("i")) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1")
        removed(tmp_path)
        await store.commit(epoch, StoreChange({"b": b"2"}, must_last=False))
        assert "store" in store.problems()
        newer = await store.claim_epoch()
        assert newer > epoch
        with pytest.raises(StaleEpochError):
            await store.commit(epoch, StoreChange({"c": b"3"}, must_last=False))
        await store.commit(newer, StoreChange({"c": b"3"}, must_last=False))
        assert await store.load() == {"a": b"1", "b": b"2", "c": b"3"}


@pytest.mark.parametrize("lose", [moved_away, removed, replaced])
async def test_rewritten_records_are_what_the_next_start_finds(
    make: MakeStore, lose: Callable[[Path], None], tmp_path: Path
) -> None:
    async with opened(make("i")) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1", gone=b"1", odd=b"?")
        lose(tmp_path)
        await store.commit(epoch, StoreChange({"b": b"2", "gone": None}, must_last=False))
        await store.rewrite(epoch, StoreChange({"a": b"1", "b": b"2"}), unreadable=["odd"])
        assert store.problems() == {}
        assert await commit(store, epoch, c=b"3") == {"a": b"1", "b": b"2", "c": b"3", "odd": b"?"}
    assert await reread(make) == {"a": b"1", "b": b"2", "c": b"3", "odd": b"?"}
    async with opened(make("i")) as store:
        assert await store.claim_epoch() > epoch


@pytest.mark.parametrize("make", ["memory", *DURABLE], indirect=True)
async def test_a_sound_store_can_be_rewritten(make: MakeStore, tmp_path: Path) -> None:
    async with opened(make("i")) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1", gone=b"1")
        await store.rewrite(epoch, StoreChange({"a": b"2"}))
        assert await commit(store, epoch, b=b"1") == {"a": b"2", "b": b"1"}


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_compacted_store_is_not_lost(kind: str, tmp_path: Path) -> None:
    async with opened(place(kind, tmp_path)("i")) as store:
        if kind != "sqlite":
            await compact(store)  # there is nothing yet
        epoch = await store.claim_epoch()
        for number in range(6):
            await commit(store, epoch, a=b"%d" % number)
            if kind != "sqlite":
                await compact(store)
                await compact(store)
        assert store.problems() == {}


async def test_records_are_not_written_over_those_of_a_newer_instance(
    make: MakeStore, tmp_path: Path
) -> None:
    async with opened(make("i")) as store, opened(make("i")) as newer:
        epoch = await store.claim_epoch()
        await commit(newer, await newer.claim_epoch(), a=b"theirs")
        with pytest.raises(StaleEpochError):
            await store.rewrite(epoch, StoreChange({"a": b"ours"}))
        assert await newer.load() == {"a": b"theirs"}


@pytest.mark.parametrize("scheme", ["sqlite", "file"])
async def test_a_rewrite_that_fails_leaves_what_is_in_memory(scheme: str, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    path = folder / ("store.db" if scheme == "sqlite" else "store")
    async with opened(open_store(f"{scheme}:///{path}", "i")) as store:
        epoch = await store.claim_epoch()
        await commit(store, epoch, a=b"1")
        shutil.rmtree(tmp_path / "above")
        with pytest.raises(StoreError, match="there is no folder"):
            await store.rewrite(epoch, StoreChange({"a": b"1"}))
        assert await store.load() == {"a": b"1"}
        await refused(store)
        (tmp_path / "above").mkdir()
        if scheme == "file":
            folder.mkdir()
        await store.rewrite(epoch, StoreChange({"a": b"1"}))
        assert await commit(store, epoch, b=b"2") == {"a": b"1", "b": b"2"}
