"""The SQLite store: durability settings, translation of SQLite's errors, damage and cost."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import statistics
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from store_harness import commit, editing, in_thread, opened, sqlite_half

from daskserve.cluster.protocols.base import InstanceStore, StoreChange
from daskserve.cluster.store import sqlite as store_sqlite
from daskserve.cluster.store.opening import StoreError, StoreUnavailableError, open_store
from daskserve.cluster.store.sqlite_log import WALCheckpointer
from daskserve.cluster.store.sqlite_rows import scan


def sqlite_store(path: Path | str, instance: str = "i") -> InstanceStore:
    return open_store(f"sqlite:///{path}", instance)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


async def filled(path: Path, records: Mapping[str, bytes | None]) -> None:

    async with opened(sqlite_store(path)) as store:
        await store.commit(1, StoreChange(records))


async def test_every_commit_is_synced_to_a_write_ahead_log(path: Path) -> None:
    async with opened(sqlite_store(path)) as store:
        db = sqlite_half(store)._db
        assert await in_thread(store, lambda: db.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
        assert await in_thread(store, lambda: db.execute("PRAGMA synchronous").fetchone()) == (2,)  # FULL
    # Closing the last connection checkpoints the log and removes it.
    assert os.listdir(path.parent) == ["store.db"]


async def test_urls_take_relative_and_absolute_paths(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    async with opened(sqlite_store("store.db")) as store:
        await commit(store, 1, a=b"1")
    async with opened(sqlite_store(path)) as store:
        assert await store.load() == {"a": b"1"}


async def test_a_commit_that_fails_midway_writes_nothing(path: Path) -> None:
    async with opened(sqlite_store(path)) as store:
        await commit(store, 1, a=b"1")
        with editing(path) as db:
            db.execute(
                "CREATE TRIGGER fire BEFORE INSERT ON daskserve_records WHEN NEW.key = 'c' "
                "BEGIN SELECT RAISE(ABORT, 'the disk is on fire'); END"
            )
        with pytest.raises(StoreError, match="the disk is on fire"):
            await store.commit(2, StoreChange({"a": b"2", "b": b"2", "c": b"2"}))
        assert await store.load() == {"a": b"1"}
        assert await store.newest_epoch() == 1
        assert await commit(store, 1, a=None, d=b"4") == {"d": b"4"}


# ---- unusable locations


async def refused(path: Path | str) -> StoreError:

    store = sqlite_store(path)
    with pytest.raises(StoreError) as caught:
        await store.open()
    error = caught.value
    assert f"The store sqlite:///{path} cannot be " in str(error)
    assert not error.is_retryable
    return error


async def test_a_file_that_is_no_database_is_refused_and_unchanged(path: Path) -> None:
    path.write_bytes(b"something else of value\n" * 100)
    assert "it is not an SQLite database; use another file" in str(await refused(path))
    assert path.read_bytes() == b"something else of value\n" * 100


async def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "the path must name a file" in str(await refused(tmp_path))


async def test_a_path_where_no_file_can_be_created_is_refused() -> None:
    assert "the scheduler's user may write" in str(await refused("/proc/self/store.db"))


async def test_other_tables_in_the_file_are_unchanged(path: Path) -> None:
    with editing(path) as db:
        db.execute("CREATE TABLE records (key, value)")
        db.execute("INSERT INTO records VALUES ('a', 'theirs')")
    await filled(path, {"a": b"ours"})
    with editing(path) as db:
        assert db.execute("SELECT * FROM records").fetchall() == [("a", "theirs")]


async def test_a_read_only_store_refuses_commits_and_still_loads(path: Path) -> None:
    async with opened(sqlite_store(path)) as store:
        await commit(store, 1, a=b"1")
        db = sqlite_half(store)._db
        await in_thread(store, lambda: db.execute("PRAGMA query_only = 1"))
        with pytest.raises(StoreError, match="give the scheduler's user the right to write the file"):
            await store.commit(1, StoreChange({"a": b"2"}))
        assert await store.load() == {"a": b"1"}


async def test_a_commit_waits_for_a_lock_then_fails_and_succeeds_once_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_sqlite, "BUSY_TIMEOUT_S", 0.05)
    async with opened(sqlite_store(path)) as store:
        await commit(store, 1, a=b"1")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="another program has held its lock") as error:
                await store.commit(1, StoreChange({"a": b"2"}))
            assert error.value.is_retryable
            assert await store.load() == {"a": b"1"}
            other.execute("ROLLBACK")
        assert await commit(store, 1, a=b"3") == {"a": b"3"}


async def test_opening_a_locked_store_raises_unavailable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_sqlite, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store_sqlite, "BUSY_RETRY_S", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE theirs (x)")
        other.execute("BEGIN EXCLUSIVE")
        store = sqlite_store(path)
        with pytest.raises(StoreUnavailableError):
            await store.open()
        other.execute("ROLLBACK")
    async with opened(store):
        assert await store.load() == {}


# ---- formats


async def test_an_older_format_is_upgraded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled(path, {"a": b"1"})
    monkeypatch.setattr(store_sqlite, "FORMAT", 3)
    monkeypatch.setattr(
        store_sqlite,
        "UPGRADES",
        {1: "CREATE TABLE daskserve_new (x)", 2: "ALTER TABLE daskserve_new RENAME TO daskserve_newer"},
    )

    for _ in range(2):
        async with opened(sqlite_store(path)) as store:
            assert await store.load() == {"a": b"1"}
    with editing(path) as db:
        assert db.execute("SELECT value FROM daskserve_meta WHERE name = 'format'").fetchall() == [(3,)]
        assert db.execute("SELECT * FROM daskserve_newer").fetchall() == []


# ---- damage

DAMAGES: Mapping[str, str] = {
    "value": "UPDATE daskserve_records SET value = x'00' || substr(value, 2) WHERE key = 'b'",
    "type": "UPDATE daskserve_records SET value = 'text' WHERE key = 'b'",
    "cut off": "UPDATE daskserve_records SET value = substr(value, 1, 1) WHERE key = 'b'",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_record_is_set_aside_and_reported_and_the_others_load(
    path: Path, damage: str
) -> None:
    await filled(path, {"a": b"11", "b": b"22", "c": b"33"})
    with editing(path) as db:
        db.execute(damage)
        (damaged,) = db.execute("SELECT value FROM daskserve_records WHERE key = 'b'").fetchone()

    for _ in range(2):  # the second load still reports it
        async with opened(sqlite_store(path)) as store:
            assert await store.load() == {"a": b"11", "c": b"33"}
            assert list(store.problems()) == ["b"]
            assert "damaged in the file" in store.problems()["b"]
            assert "daskserve_aside" in store.problems()["b"]
    async with opened(sqlite_store(path, "other")) as store:
        assert await store.load() == {}
        assert store.problems() == {}
    async with opened(sqlite_store(path)) as store:
        assert (await commit(store, 1, b=b"new"))["b"] == b"new"
        assert store.problems() == {}
    async with opened(sqlite_store(path)) as store:
        assert (await store.load())["b"] == b"new"
        assert store.problems() == {}
    with editing(path) as db:
        assert db.execute("SELECT key, value FROM daskserve_aside").fetchall() == [("b", damaged)]


async def test_a_record_with_a_key_that_is_no_text_is_set_aside(path: Path) -> None:
    await filled(path, {"a": b"1", "b": b"2"})
    with editing(path) as db:
        db.execute("UPDATE daskserve_records SET key = CAST(x'ff62' AS TEXT) WHERE key = 'b'")
    async with opened(sqlite_store(path)) as store:
        assert await store.load() == {"a": b"1"}
        assert len(store.problems()) == 1


async def test_a_damaged_page_loses_only_its_record(path: Path) -> None:
    await filled(path, {"a": b"1", "large": b"L" * 200_000, "z": b"2"})
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    # Overflow pages, which hold only the large value, begin with the number of the next overflow page.
    inside = next(at for at in range(0, len(data), size) if data[at + 4 : at + 200] == b"L" * 196)
    data[inside : inside + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    async with opened(sqlite_store(path)) as store:
        assert await store.load() == {"a": b"1", "z": b"2"}
        assert re.search("cannot be read.*malformed", store.problems()["large"])
        assert await commit(store, 2, y=b"3") == {"a": b"1", "z": b"2", "y": b"3"}


# ---- cost

#: The marks that each commit updates.
STAMPED = ("sealed", "records", "epochs")
#: Bytes of one page and its header in the log.
PAGE = 4096 + 24


def test_the_cost_of_a_commit_does_not_grow_with_the_records(path: Path) -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        async with opened(sqlite_store(path)) as store:
            db = sqlite_half(store)._db
            await in_thread(store, lambda: db.execute("PRAGMA wal_autocheckpoint = 0"))

            async def cost(number: int) -> tuple[int, int]:
                changes, size = await in_thread(store, lambda: db.total_changes), log_size()
                await store.commit(1, StoreChange(backend(number)))
                return await in_thread(store, lambda: db.total_changes) - changes, log_size() - size

            def log_size() -> int:
                return path.with_name("store.db-wal").stat().st_size

            await store.commit(1, StoreChange({}))
            early = [await cost(number) for number in range(20)]
            most = [backend(number) for number in range(20, 990)]
            await store.commit(1, StoreChange({key: value for each in most for key, value in each.items()}))
            late = [await cost(number) for number in range(990, 1010)]
        assert {rows for rows, _ in early[1:] + late} == {3 + len(STAMPED)}
        return [size for _, size in early], [size for _, size in late]

    early, late = asyncio.run(scenario())
    # SQLite writes whole pages: a small index fits on one page, a large one has a page per record.
    assert statistics.median(late) <= statistics.median(early) + 3 * PAGE


def backend(number: int) -> dict[str, bytes | None]:
    return {
        f"backend/b{number}": b"x" * 500,
        f"replica/b{number}#0": b"y" * 200,
        f"goal/{number * 7919 % 1009}": b"z" * 100,
    }


def test_errors_without_a_name_are_translated(path: Path) -> None:
    class Nameless(sqlite3.DatabaseError):
        pass

    def fail() -> None:
        with sqlite_half(store)._translated_errors():
            raise Nameless("what it was")

    store = sqlite_store(path)
    action: Callable[[], None] = fail
    with pytest.raises(StoreError, match="cannot be used: Nameless: what it was"):
        action()


def test_only_damage_is_read_row_by_row() -> None:
    with (
        closing(sqlite3.connect(":memory:")) as db,
        pytest.raises(sqlite3.OperationalError, match="no such table"),
    ):
        scan(db, "i")


def test_a_log_that_is_not_checkpointed_again_and_again_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    checkpointer = WALCheckpointer(sqlite3.connect(":memory:", check_same_thread=False), "sqlite:///a.db")
    assert [checkpointer._try(fail) for _ in range(5)] == [False] * 5
    checkpointer.stop()
    assert [each.getMessage() for each in caplog.records] == [
        "The write-ahead log of store sqlite:///a.db was not checkpointed: database or disk is full"
    ]
