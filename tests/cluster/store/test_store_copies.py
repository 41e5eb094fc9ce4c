"""Copies of an SQLite store: which are complete, and that a copy without its log is reported."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
from store_harness import commit, editing, in_thread, opened, sqlite_half
from test_store_killed import commit_until_killed

from daskserve.cluster.protocols.base import InstanceStore, StoreChange
from daskserve.cluster.store import sqlite as store_sqlite
from daskserve.cluster.store import sqlite_log
from daskserve.cluster.store.errors import StoreError, StoreIncompleteError
from daskserve.cluster.store.opening import open_store
from daskserve.cluster.store.sqlite import SqliteStore

T = TypeVar("T")
DEADLINE_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "serve.db"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_log, "IDLE_S", 0.05)


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_log, "IDLE_S", 3600.0)


def store_at(path: Path) -> InstanceStore:
    return open_store(f"sqlite:///{path}", "i")


async def found_in(path: Path) -> Mapping[str, bytes]:
    async with opened(store_at(path)) as store:
        return await store.load()


async def copy_alone(path: Path) -> Mapping[str, bytes]:
    """Return the records in a copy of the file without its log."""
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    try:
        return await found_in(copy)
    finally:
        for each in path.parent.glob("copy.db*"):
            each.unlink()


async def until_refused(path: Path) -> str:
    async def refused() -> str:
        try:
            await copy_alone(path)
        except StoreIncompleteError as error:
            return str(error)
        return ""

    return await eventually(refused)


async def until_whole(path: Path, expected: Mapping[str, bytes]) -> None:
    async def is_whole() -> bool:
        try:
            return await copy_alone(path) == expected
        except StoreIncompleteError:
            return False

    await eventually(is_whole)


async def eventually(condition: Callable[[], Awaitable[T]]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := await condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


@pytest.mark.usefixtures("never_idle")
async def test_a_copy_of_a_busy_file_without_its_log_is_refused_with_the_remedy(path: Path) -> None:
    async with opened(store_at(path)) as store:
        await store.claim_epoch()
        await commit(store, 1, a=b"1")
        text = await until_refused(path)
        assert "records are missing: later changes were written to its log, which is missing" in text
        assert "without copy.db-wal, copy both, or restore a backup" in text
        for _ in range(3):  # whatever follows
            await commit(store, 1, b=b"2")
            with pytest.raises(StoreIncompleteError):
                await copy_alone(path)
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", path.parent / f"both.db{end}")
        assert await found_in(path.parent / "both.db") == {"a": b"1", "b": b"2"}
    assert await copy_alone(path) == {"a": b"1", "b": b"2"}  # it is closed


@pytest.mark.usefixtures("quick")
async def test_the_file_alone_is_whole_once_the_store_is_idle_and_until_the_next_change(path: Path) -> None:
    expected: dict[str, bytes] = {}
    async with opened(store_at(path)) as store:
        for number in range(3):
            expected[f"k{number}"] = b"%d" % number
            await store.commit(1, StoreChange({f"k{number}": b"%d" % number}))
            await until_whole(path, expected)


async def test_the_first_change_after_a_pause_is_noted_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_log, "IDLE_S", 0.05)
    async with opened(store_at(path)) as store:
        await commit(store, 1, a=b"1")
        await until_whole(path, {"a": b"1"})
        monkeypatch.setattr(sqlite_log, "IDLE_S", 3600.0)
        await commit(store, 1, b=b"2")
        await until_refused(path)


async def test_a_killed_process_leaves_a_file_that_needs_its_log_and_has_it(path: Path) -> None:
    acknowledged = commit_until_killed(f"sqlite:///{path}", 30)
    try:
        alone = await copy_alone(path)
    except StoreIncompleteError:
        pass
    else:
        # On a busy machine, the process may have been idle just before, so the file is complete; or the file
        # was not yet marked after its first change, so it is empty.
        assert not alone or int(alone["count"]) >= acknowledged
    assert int((await found_in(path))["count"]) >= acknowledged
    assert await copy_alone(path)


@pytest.mark.usefixtures("never_idle")
async def test_a_process_killed_while_it_marks_the_file_starts_again(path: Path) -> None:
    async with opened(store_at(path)) as store:
        await commit(store, 1, a=b"1")
        await until_refused(path)
        db = sqlite_half(store)._db
        await in_thread(store, lambda: db.execute(sqlite_log._PROMISE))
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", path.parent / f"killed.db{end}")
    assert await found_in(path.parent / "killed.db") == {"a": b"1"}
    (path.parent / "killed.db-wal").unlink(missing_ok=True)
    assert await found_in(path.parent / "killed.db") == {"a": b"1"}


@pytest.mark.usefixtures("never_idle")
async def test_a_copy_that_sqlite_makes_is_whole_once_the_promise_is_kept(path: Path) -> None:
    async def is_kept() -> bool:
        marks = "SELECT value FROM daskserve_meta WHERE name IN ('promised', 'kept')"
        with closing(sqlite3.connect(path)) as db:
            return len(set(db.execute(marks))) == 1

    async with opened(store_at(path)) as store:
        await commit(store, 1, a=b"1")
        await until_refused(path)
        await eventually(is_kept)
        await commit(store, 1, b=b"2")
        copies = [path.with_name("backup.db"), path.with_name("vacuum.db")]
        with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(copies[0])) as target:
            db.backup(target)
            db.execute(f"VACUUM INTO '{copies[1]}'")
        for each in copies:
            assert await found_in(each) == {"a": b"1", "b": b"2"}


@pytest.mark.usefixtures("never_idle")
async def test_a_log_that_has_grown_is_written_back_and_the_file_still_needs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_sqlite, "LOG_BYTES", 100_000)
    async with opened(store_at(path)) as store:
        for number in range(30):
            await store.commit(1, StoreChange({f"k{number % 3}": os.urandom(20_000)}))
        assert (await in_thread(store, lambda: sqlite_log.size_of(sqlite_log.log_of(path))) or 0) < 500_000
        marks = "SELECT value FROM daskserve_meta WHERE name = 'promised'"
        with closing(sqlite3.connect(path)) as db:
            # Each change adds 25 to 50 kB to the log, so about every third one writes it back.
            assert 2 <= db.execute(marks).fetchone()[0] <= 15
        await until_refused(path)


@pytest.mark.parametrize("is_link", [False, True])
async def test_an_empty_file_is_refused_and_stays(path: Path, is_link: bool) -> None:
    target = path.with_name("target.db") if is_link else path
    target.touch()
    if is_link:
        path.symlink_to(target)
    with pytest.raises(StoreIncompleteError, match=r"is empty\. If it had records"):
        await found_in(path)
    assert target.stat().st_size == 0


async def test_a_copy_of_a_file_of_an_earlier_version_without_its_log_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    with pytest.raises(StoreIncompleteError, match="all of its records were in its log"):
        await found_in(path)


async def test_a_store_without_marks_is_read_and_gets_them(path: Path) -> None:
    async with opened(store_at(path)) as store:
        await commit(store, 1, a=b"1", b=b"2")
    with editing(path) as db:
        db.execute("DELETE FROM daskserve_meta WHERE name <> 'format'")
        db.execute("DELETE FROM daskserve_records WHERE key = 'b'")
    assert await found_in(path) == {"a": b"1"}
    async with opened(store_at(path)) as store:
        await commit(store, 1, b=b"2")
    with editing(path) as db:
        db.execute("DELETE FROM daskserve_records WHERE key = 'b'")
    with pytest.raises(StoreIncompleteError, match="it has 1 records and should have 2"):
        await found_in(path)


async def test_records_of_an_older_daskserve_are_not_missing(path: Path) -> None:
    """The older version writes no marks, and claims an epoch when it starts."""
    async with opened(store_at(path)) as store:
        await commit(store, 1, a=b"1", b=b"2")
    with editing(path) as db:
        db.execute("UPDATE daskserve_epochs SET epoch = epoch + 1")
        db.execute("DELETE FROM daskserve_records WHERE key = 'b'")
    assert await found_in(path) == {"a": b"1"}


async def test_missing_records_can_be_accepted(path: Path) -> None:
    async with opened(store_at(path)) as store:
        await commit(store, 1, a=b"1", b=b"2")
    with editing(path) as db:
        db.execute("DELETE FROM daskserve_records WHERE key = 'b'")
    store = SqliteStore(f"sqlite:///{path}", "i", str(path))
    assert "should have 2" in store.repair()
    store.close()
    assert await found_in(path) == {"a": b"1"}


async def test_a_new_file_appears_with_its_tables_or_not_at_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no links")

    monkeypatch.setattr(store_sqlite, "TABLES", ("CREATE nothing",))
    with pytest.raises(StoreError, match="syntax error"):
        await found_in(path)
    assert os.listdir(path.parent) == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "link", fail)
    assert await found_in(path) == {}
    assert os.listdir(path.parent) == [path.name]


async def test_only_changes_that_may_not_wait_are_synced(path: Path) -> None:
    async with opened(store_at(path)) as store:
        traced: list[str] = []
        await in_thread(store, lambda: sqlite_half(store)._db.set_trace_callback(traced.append))
        await store.commit(1, StoreChange({"a": b"1"}, must_last=False, may_wait=True))
        assert [each for each in traced if "synchronous" in each] == ["PRAGMA synchronous = NORMAL"]
        traced.clear()
        await store.commit(1, StoreChange({"a": b"2"}))
        assert [each for each in traced if "synchronous" in each] == ["PRAGMA synchronous = FULL"]
        traced.clear()
        await store.commit(1, StoreChange({}))
        assert not any(each.startswith(("BEGIN", "UPDATE")) for each in traced)
