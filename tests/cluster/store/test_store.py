"""Guarantees of every store: transactions are atomic, and only the newest controller can write."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sqlite3
import tempfile
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_harness import MakeStore, commit, compact, opened, place
from tables import each_case

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store import sqlite_files
from daskserve.cluster.store.errors import StoreError, StoreUnavailableError
from daskserve.cluster.store.opening import MemoryStore, StoreFormatError, open_store
from daskserve.errors import BadRequestError, ClosedError, StaleEpochError, UnavailableError


@pytest.fixture(params=["memory", "sqlite", "folder", "bucket"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return a factory of stores at one location, for each kind of location."""
    return place(request.param, tmp_path)


@pytest.fixture(params=["sqlite", "folder", "renames"])
def durable(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return a factory like `make`, for the locations that outlive their stores."""
    return place(request.param, tmp_path)


def upgrade_format(path: Path, number: int) -> None:
    """Mark a store as written by a newer daskserve."""
    file = path / "store.db"
    if file.exists():
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("UPDATE daskserve_meta SET value = ? WHERE name = 'format'", (number,))
    else:
        (path / "store" / "i" / "format" / f"{number:08}").write_bytes(b"")


# ---- records


async def test_records_are_written_replaced_and_removed(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        assert await store.load() == {}
        assert await commit(store, 1, a=b"1", b=b"2") == {"a": b"1", "b": b"2"}
        assert await commit(store, 1, a=b"3", b=None, c=None) == {"a": b"3"}
        assert await commit(store, 1) == {"a": b"3"}
        assert store.problems() == {}


async def test_load_returns_a_copy(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        before = await commit(store, 1, a=b"1")
        await commit(store, 1, a=None)
        assert before == {"a": b"1"}


KEYS = {
    "backend/ünïcødé 😀": b"1",
    "replica/a#b%2F../..\\ *?[x]": b"2",
    "with\x00nul and \n newline": b"3",
    "e\u0301": b"4",  # not the same as é
    "é": b"5",
    "": b"",
    "x" * 3000: b"\x00\xff",
}


async def test_any_key_round_trips(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        await store.commit(1, StoreChange(KEYS))
        assert await store.load() == KEYS


async def test_a_large_value_round_trips(make: MakeStore) -> None:
    large = os.urandom(5 << 20)
    async with opened(make("i")) as store:
        assert await commit(store, 1, a=large, b=b"1") == {"a": large, "b": b"1"}


async def test_commits_run_in_the_order_of_their_calls(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        changes = [StoreChange({"last": b"%d" % each, f"k{each}": b""}) for each in range(20)]
        await asyncio.gather(*(store.commit(1, change) for change in changes))
        assert await store.load() == {"last": b"19", **{f"k{each}": b"" for each in range(20)}}


async def test_instances_that_share_a_location_are_isolated(make: MakeStore) -> None:
    names = ["i", "I", "i/j", "..", "i.", "ï", "", "txn"]
    stores = [make(name) for name in names]
    for number, store in enumerate(stores):
        await store.open()
        await commit(store, number + 1, shared=b"%d" % number)
    await commit(stores[0], 1, shared=None)
    assert [await store.load() for store in stores] == [
        {},
        *({"shared": b"%d" % number} for number in range(1, len(names))),
    ]
    assert [await store.newest_epoch() for store in stores] == list(range(1, len(names) + 1))
    for store in stores:
        await store.close()


# ---- epochs


async def test_a_commit_of_an_older_epoch_writes_nothing_and_raises(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        await commit(store, 1, a=b"1")
        await commit(store, 3, a=b"3")
        for records in ({"a": b"2", "b": b"2"}, {}):
            with pytest.raises(StaleEpochError, match="epoch 2 was replaced by epoch 3; its change is"):
                await store.commit(2, StoreChange(records))
        assert await store.load() == {"a": b"3"}
        assert await commit(store, 3, a=b"4") == {"a": b"4"}


def test_a_stale_epoch_error_means_retry_at_the_newer_controller() -> None:
    assert issubclass(StaleEpochError, UnavailableError)


async def test_claiming_an_epoch_fences_the_older_ones(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        assert await store.newest_epoch() == 0
        assert [await store.claim_epoch() for _ in range(2)] == [1, 2]
        assert await store.newest_epoch() == 2
        with pytest.raises(StaleEpochError):
            await commit(store, 1, a=b"1")
        await commit(store, 5, a=b"5")
        assert await store.claim_epoch() == 6
        assert await store.load() == {"a": b"5"}


async def test_concurrent_claims_get_different_epochs(make: MakeStore) -> None:
    async with opened(make("i")) as store:
        assert sorted(await asyncio.gather(*(store.claim_epoch() for _ in range(5)))) == [1, 2, 3, 4, 5]


# ---- durability


async def test_a_reopened_store_keeps_its_records_and_claims_a_higher_epoch(durable: MakeStore) -> None:
    async with opened(durable("i")) as store:
        assert await store.claim_epoch() == 1
        await store.commit(1, StoreChange({"a": b"1", "b": b"2"}))
        assert await store.claim_epoch() == 2
        await store.commit(2, StoreChange({"a": None}))
    async with opened(durable("i")) as store:
        assert await store.newest_epoch() == 2
        assert await store.load() == {"b": b"2"}
        assert await commit(store, 2, c=b"3") == {"b": b"2", "c": b"3"}
        assert await store.claim_epoch() == 3
    async with opened(durable("i")) as store:
        with pytest.raises(StaleEpochError):
            await store.commit(2, StoreChange({"a": b"4"}))
        assert await commit(store, 3) == {"b": b"2", "c": b"3"}


async def test_a_second_process_at_one_location_fences_the_first(durable: MakeStore) -> None:
    async with opened(durable("i")) as one, opened(durable("i")) as two:
        assert await one.claim_epoch() == 1
        assert await commit(one, 1, a=b"one") == {"a": b"one"}
        assert await two.claim_epoch() == 2
        with pytest.raises(StaleEpochError):
            await one.commit(1, StoreChange({"a": b"late", "b": b"late"}))
        assert await commit(two, 2, c=b"two") == {"a": b"one", "c": b"two"}
        assert await one.load() == {"a": b"one", "c": b"two"}
        assert await one.claim_epoch() == 3
        assert await commit(one, 3, a=None) == {"c": b"two"}
        with pytest.raises(StaleEpochError):
            await two.commit(2, StoreChange({}))
        assert await two.load() == {"c": b"two"}


async def test_concurrent_claims_and_commits_of_two_processes_wait_for_each_other(durable: MakeStore) -> None:
    async with opened(durable("i")) as one, opened(durable("i")) as two, opened(durable("j")) as other:
        claims = [store.claim_epoch() for store in (one, two) * 5]
        writes = [other.commit(1, StoreChange({f"k{number}": b""})) for number in range(10)]
        epochs, _ = await asyncio.gather(asyncio.gather(*claims), asyncio.gather(*writes))
        assert len(set(epochs)) == 10
        assert await one.newest_epoch() == await two.newest_epoch() == max(epochs)
        assert len(await other.load()) == 10


async def test_two_processes_with_one_epoch_keep_each_others_records(durable: MakeStore) -> None:
    async with opened(durable("i")) as one, opened(durable("i")) as two:
        await commit(one, 1, a=b"1")
        await commit(two, 1, b=b"2")
        await commit(one, 1, c=b"3")
        await commit(two, 1, b=None)
    async with opened(durable("i")) as store:
        assert await store.load() == {"a": b"1", "c": b"3"}


Operation = tuple[str, Mapping[str, bytes | None]]
KEY = st.one_of(st.sampled_from(["a", "b", "c"]), st.text(max_size=5))
CHANGES = st.dictionaries(KEY, st.one_of(st.none(), st.binary(max_size=20)), max_size=4)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), CHANGES),
        st.tuples(st.sampled_from(["reopen", "claim", "stale", "load", "compact"]), st.just({})),
    ),
    max_size=25,
)


@each_case(
    ("number", "error", "text"),
    [
        (errno.EACCES, StoreError, "give the scheduler's user the right to write"),
        (errno.EROFS, StoreError, "give the scheduler's user the right to write"),
        (errno.ENOSPC, StoreUnavailableError, "the disk is full"),
        (errno.EIO, StoreUnavailableError, "the disk reports an error"),
    ],
)
async def test_a_new_file_that_cannot_be_created_is_an_error_of_the_store(
    number: int, error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(sqlite_files, "create_empty", refuse)
    with pytest.raises(error, match=rf"The store sqlite:///{tmp_path}/s.db cannot be used: .*{text}"):
        await open_store(f"sqlite:///{tmp_path}/s.db", "i").open()


@pytest.mark.parametrize("kind", ["sqlite", "folder"])
@settings(max_examples=15)
@given(operations=OPERATIONS)
def test_any_sequence_of_commits_and_restarts_equals_a_dict(kind: str, operations: list[Operation]) -> None:
    async def scenario(make: MakeStore) -> None:
        model: dict[str, bytes] = {}
        epoch = 0
        store = make("i")
        await store.open()
        for verb, records in operations:
            if verb == "commit":
                await store.commit(epoch, StoreChange(records))
                model.update({key: value for key, value in records.items() if value is not None})
                model = {key: value for key, value in model.items() if records.get(key, value) is not None}
            elif verb == "claim":
                epoch += 1
                assert await store.claim_epoch() == epoch
            elif verb == "stale" and epoch:
                with pytest.raises(StaleEpochError):
                    await store.commit(epoch - 1, StoreChange({"a": b"stale"}))
            elif verb == "compact" and kind != "sqlite":
                await compact(store)
            elif verb == "reopen":
                await store.close()
                store = make("i")
                await store.open()
            else:
                assert await store.load() == model
        await store.close()
        async with opened(make("i")) as store:
            assert await store.load() == model
            assert await store.newest_epoch() == epoch
            assert store.problems() == {}

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(scenario(place(kind, Path(path))))


# ---- lifecycle


def test_open_and_close_are_idempotent_and_leave_no_thread_or_file(
    durable: MakeStore, tmp_path: Path
) -> None:
    def open_files() -> list[str]:
        paths = [os.path.realpath(f"/proc/self/fd/{handle}") for handle in os.listdir("/proc/self/fd")]
        return [path for path in paths if path.startswith(str(tmp_path))]

    async def scenario() -> None:
        store = durable("i")
        threads = set(threading.enumerate())
        await store.open()
        await store.open()
        names = {each.name for each in set(threading.enumerate()) - threads}
        assert names - {"daskserve-store-log"} == {"daskserve-store-i"}
        await commit(store, 1, a=b"1")
        await store.close()
        await store.close()
        assert set(threading.enumerate()) <= threads
        with pytest.raises(ClosedError, match="is not open"):
            await store.load()
        await store.open()
        assert await store.load() == {"a": b"1"}
        await store.close()

    asyncio.run(scenario())
    gc.collect()
    assert open_files() == []


async def test_close_finishes_pending_commits(durable: MakeStore) -> None:
    store = durable("i")
    await store.open()
    changes = [StoreChange({f"k{number}": b""}) for number in range(5)]
    commits = [asyncio.create_task(store.commit(1, change)) for change in changes]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*commits)
    async with opened(durable("i")) as again:
        assert len(await again.load()) == 5


async def test_a_cancelled_commit_leaves_the_store_consistent(durable: MakeStore) -> None:
    async with opened(durable("i")) as store:
        await store.commit(1, StoreChange({"a": b"1"}))
        late = asyncio.create_task(store.commit(1, StoreChange({"b": b"2", "c": b"2"})))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert late.cancelled()
        await store.commit(1, StoreChange({"d": b"3"}))
        found = await store.load()
        # The cancelled commit may be applied, but only whole.
        assert found in ({"a": b"1", "d": b"3"}, {"a": b"1", "b": b"2", "c": b"2", "d": b"3"})


# ---- URLs


def test_each_instance_has_its_own_memory_store() -> None:
    one, two = open_store("memory://", "i"), open_store("memory://", "i")
    assert isinstance(one, MemoryStore)
    assert one is not two


def test_an_invalid_store_url_is_refused() -> None:
    for url in [
        "",
        "nowhere",
        "/a/path",
        "mem://",
        "carrier-pigeon://home",
        "memory://path",
    ]:
        with pytest.raises(BadRequestError, match=f"Store URL '{url}' has "):
            open_store(url, "i")
    with pytest.raises(BadRequestError, match="unknown scheme 'nosuch'"):
        open_store("nosuch::file:///x", "i")


def test_an_sqlite_url_without_a_file_is_refused() -> None:
    for url in ["sqlite://", "sqlite:///", "sqlite://host", "sqlite:///:memory:"]:
        with pytest.raises(BadRequestError, match="names no file; write sqlite:///relative"):
            open_store(url, "i")


def test_errors_mask_passwords_in_urls() -> None:
    with pytest.raises(BadRequestError, match=r"pigeon://me:\*\*\*@home' has an unknown scheme"):
        open_store("pigeon://me:secret@home", "i")
    assert "secret" not in repr(open_store("sftp://me:secret@home/folder", "i"))


async def test_the_error_for_a_missing_parent_folder_names_it(tmp_path: Path) -> None:
    for url in ["sqlite:///{}/missing/store.db", "file://{}/missing/store"]:
        store = open_store(url.format(tmp_path), "i")
        with pytest.raises(Exception, match=f"there is no folder {tmp_path}/missing on the scheduler's"):
            await store.open()
        with pytest.raises(ClosedError):
            await store.load()


# ---- formats


@pytest.mark.parametrize("kind", ["sqlite", "folder"])
async def test_a_newer_format_is_refused_with_the_remedy(kind: str, tmp_path: Path) -> None:
    def content() -> dict[Path, bytes]:
        return {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}

    make = place(kind, tmp_path)
    async with opened(make("i")) as store:
        await commit(store, 1, a=b"1")
    upgrade_format(tmp_path, 7)
    before = content()
    with pytest.raises(StoreFormatError, match=r"has format 7; .* up to 1\. Install the vers"):
        await make("i").open()
    assert content().items() >= before.items()


@pytest.mark.parametrize("kind", ["sqlite", "folder"])
async def test_claiming_an_epoch_refuses_a_format_upgraded_meanwhile(kind: str, tmp_path: Path) -> None:
    async with opened(place(kind, tmp_path)("i")) as store:
        assert await store.claim_epoch() == 1
        upgrade_format(tmp_path, 2)
        with pytest.raises(StoreFormatError):
            await store.claim_epoch()
