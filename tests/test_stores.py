"""Backups, restores and checks of stores: their guarantees for operators."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import restoring

from daskserve import stores
from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store import fsspec as store_fsspec
from daskserve.cluster.store.errors import StoreError, StoreIncompleteError
from daskserve.cluster.store.opening import open_store
from daskserve.control.records.records import AppRecord, BackendRecord, CodeRecord, EndpointRecord
from daskserve.control.records.storing.checkpoint import encoded
from daskserve.errors import AlreadyRunningError, BadRequestError, NotFoundError
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.payload.parcels import Parcel
from daskserve.payload.pickling import dump_bytes

KINDS = ("sqlite", "folder")


def url_of(kind: str, path: Path, name: str = "store") -> str:
    return f"sqlite:///{path}/{name}.db" if kind == "sqlite" else f"file://{path}/{name}"


def records(code: bytes | None = None) -> dict[str, bytes]:
    """Return the records of an application with one deployment."""
    made = (
        AppRecord("default", "/", {"model": "model"}),
        BackendRecord("model", "v1", "model@v1", BackendConfig(), "c1", ActorOptions(), user_version="7"),
        CodeRecord("model@v1", "model", dump_bytes((len, (), {})) if code is None else code),
        EndpointRecord("model", "/", ("GET",), {"model": 1.0}),
    )
    return encoded({each.key: each for each in made})


def fill(url: str, instance: str = "default", given: Mapping[str, bytes] | None = None) -> int:
    async def main() -> int:
        store = open_store(url, instance)
        await store.open()
        epoch = await store.claim_epoch()
        await store.rewrite(epoch, StoreChange(dict(records() if given is None else given)))
        await store.close()
        return epoch

    return asyncio.run(main())


def found_in(url: str, instance: str = "default") -> Mapping[str, bytes]:
    async def main() -> Mapping[str, bytes]:
        store = open_store(url, instance)
        await store.open()
        try:
            return await store.load()
        finally:
            await store.close()

    return asyncio.run(main())


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_backup_restores_into_any_kind_of_store(tmp_path: Path, kind: str, target: str) -> None:
    url, other = url_of(kind, tmp_path), url_of(target, tmp_path, "other")
    for _ in range(3):
        epoch = fill(url)
    fill(url, "an/other one", {"goal/g": b"?"})
    report = stores.backup(url, tmp_path / "b")
    assert set(report.instances) == {"default", "an/other one"}
    assert report.instances["default"].deployments == {"model": "7"}
    assert report.instances["default"].applications == ["default"]
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    fill(other, "a third", {"a": b"1"})
    stores.restore(tmp_path / "b", other)
    assert found_in(other) == records()
    assert found_in(other, "an/other one") == {"goal/g": b"?"}
    assert found_in(other, "a third") == {"a": b"1"}
    # Actors of epochs after the backup must not be newer than the next controller.
    assert fill(other) > epoch


@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_replaces_all_records_of_the_chosen_instances(tmp_path: Path, kind: str) -> None:
    url = url_of(kind, tmp_path)
    fill(url, "a", {"k": b"1"})
    fill(url, "b", {"k": b"1"})
    stores.backup(url, tmp_path / "b")
    before = fill(url, "a", {"k": b"2", "later": b"2"})
    fill(url, "b", {"k": b"2"})
    report = stores.restore(tmp_path / "b", url, instances=["a"])
    assert (found_in(url, "a"), found_in(url, "b")) == ({"k": b"1"}, {"k": b"2"})
    assert report.instances["a"].records == {"k": 1}
    assert fill(url, "a") > before
    with pytest.raises(NotFoundError, match=r"no instance 'c' in .*; there are: 'a', 'b'"):
        stores.restore(tmp_path / "b", url, instances=["c"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_in_use_is_backed_up_and_checked_and_restored_only_if_forced(
    tmp_path: Path, kind: str
) -> None:
    url = url_of(kind, tmp_path)

    async def main() -> None:
        store = open_store(url, "default")
        await store.open()
        epoch = await store.claim_epoch()
        await store.commit(epoch, StoreChange(dict(records())))
        assert stores.backup(url, tmp_path / "b").is_sound
        assert stores.check(url).is_sound
        with pytest.raises(AlreadyRunningError, match=r"is in use by .*process.*or pass force="):
            stores.restore(tmp_path / "b", url)
        with pytest.raises(AlreadyRunningError):
            stores.repair(url)
        await store.commit(epoch, StoreChange({"goal/late": b"1"}))
        stores.restore(tmp_path / "b", url, force=True)
        await store.close()

    asyncio.run(main())
    assert found_in(url) == records()
    stores.restore(tmp_path / "b", url)  # it is closed


def test_a_folder_whose_user_was_killed_or_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of("folder", tmp_path)
    fill(url)
    stores.backup(url, tmp_path / "b")
    shutil.rmtree(tmp_path / "store" / "default" / "closed")
    with pytest.raises(AlreadyRunningError, match="on this host"):
        stores.restore(tmp_path / "b", url)
    monkeypatch.setattr(store_fsspec.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(AlreadyRunningError, match=r"on host .*, which may have ended since"):
        stores.restore(tmp_path / "b", url)
    monkeypatch.undo()
    monkeypatch.setattr(store_fsspec, "pid_exists", lambda pid: False)
    stores.restore(tmp_path / "b", url)


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_changes_nothing(tmp_path: Path, kind: str) -> None:
    url = url_of(kind, tmp_path)
    fill(url)
    before = tree(tmp_path)
    assert stores.check(url).is_sound
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("damaged", "key", "text"),
    [
        ({"app/default": b"\x80"}, "app/default", "cannot be read: .* Deploy the application again"),
        ({"backend/model": b""}, "backend/model", "cannot be read: .* Deploy it again"),
        ({"replica/model#1": b"?"}, "replica/model#1", "the next start replaces the replica"),
        ({"unknown/x": b"?"}, "unknown/x", "Restore a backup"),
        (records(b""), "code/model@v1", "The code of backend 'model' .* Deploy it again"),
        (records(b"garbage"), "code/model@v1", "The code of backend 'model' cannot be read"),
        (records(dump_bytes((len, (), {}))[:-5]), "code/model@v1", "The code of backend 'model' "),
        (records(Parcel("00" * 32, (4,)).label()), "code/model@v1", "has 0 of 128 bytes"),
        (
            {**records(Parcel("00" * 32, (4,)).label()), "parcel/model@v1/0": bytes(128)},
            "code/model@v1",
            "the digest differs",
        ),
    ],
)
def test_a_check_names_what_is_damaged_and_what_to_do(
    tmp_path: Path, damaged: Mapping[str, bytes], key: str, text: str
) -> None:
    url = url_of("sqlite", tmp_path)
    fill(url, given={**records(), **damaged})
    report = stores.check(url)
    assert not report.is_sound
    found = report.instances["default"].problems
    assert set(found) == {key}
    assert re.search(text, found[key])
    assert f"DAMAGED {key}" in str(report)


def test_lost_code_is_found(tmp_path: Path) -> None:
    url = url_of("sqlite", tmp_path)
    fill(url, given={key: each for key, each in records().items() if not key.startswith("code/")})
    problems = stores.check(url).instances["default"].problems
    assert problems == {"code/model@v1": "The code of backend 'model' is missing. Deploy it again."}


def test_rows_that_are_damaged_in_the_file_are_found_and_backed_up_without(tmp_path: Path) -> None:
    url = url_of("sqlite", tmp_path)
    fill(url)
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE daskserve_records SET value = x'00' WHERE key = 'code/model@v1'")
    for place in (url, url):
        (text,) = stores.check(place).instances["default"].problems.values()
        assert "damaged in the file (its checksum differs). Deploy it again." in text
    assert not stores.backup(url, tmp_path / "b").is_sound
    found_in(url)  # a start sets it aside
    (text,) = stores.check(url).instances["default"].problems.values()
    assert "set aside by an earlier start" in text
    fill(url)  # a deploy repairs it
    assert stores.check(url).is_sound


@pytest.mark.parametrize("kind", KINDS)
def test_missing_records_are_reported_and_given_up_only_if_forced(tmp_path: Path, kind: str) -> None:
    url = url_of(kind, tmp_path)

    async def main() -> None:
        store = open_store(url, "default")
        await store.open()
        epoch = await store.claim_epoch()
        for number in range(3):
            await store.commit(epoch, StoreChange({f"k{number}": b"%d" % number}))
        await store.close()

    asyncio.run(main())
    stores.backup(url, tmp_path / "b")
    if kind == "sqlite":
        with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
            db.execute("DELETE FROM daskserve_records WHERE key = 'k1'")
    else:
        (tmp_path / "store" / "default" / "txn" / "00000001-0000000002").unlink()
    report = stores.check(url)
    assert not report.is_sound
    assert "restore a backup, or continue with the remaining records: daskserve store repair." in report.lack
    with pytest.raises(StoreIncompleteError, match=r"missing.*restore a backup"):
        found_in(url)
    with pytest.raises(StoreIncompleteError, match="not backed up"):
        stores.backup(url, tmp_path / "b")
    shutil.copytree(tmp_path / "store", tmp_path / "c") if kind == "folder" else shutil.copy(
        tmp_path / "store.db", tmp_path / "c.db"
    )
    stores.restore(tmp_path / "b", url)
    assert set(found_in(url)) == {"k0", "k1", "k2"}
    copy = url_of(kind, tmp_path, "c")
    assert len(stores.repair(copy)) == 1
    assert set(found_in(copy)) == {"k0", "k2"}
    assert stores.repair(copy) == []


def test_a_copy_without_its_log_is_checked_and_a_backup_replaces_it(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        db.execute("PRAGMA journal_mode = WAL")
    url = url_of("sqlite", tmp_path)
    assert "All of its records were in its log" in stores.check(url).lack
    fill(url_of("folder", tmp_path))
    stores.backup(url_of("folder", tmp_path), tmp_path / "b")
    stores.restore(tmp_path / "b", url)
    assert found_in(url) == records()


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_no_store(tmp_path: Path, kind: str) -> None:
    for function in (stores.check, lambda url: stores.backup(url, tmp_path / "b")):
        with pytest.raises(StoreError, match="There is no store at"):
            function(url_of(kind, tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(BadRequestError, match="in a scheduler's memory"):
        stores.check("memory://")


@pytest.mark.parametrize("damage", ["empty", "cut off", "altered", "other", "missing", "folder"])
def test_a_damaged_backup_is_refused_and_the_store_stays(tmp_path: Path, damage: str) -> None:
    url, file = url_of("sqlite", tmp_path), tmp_path / "b"
    fill(url)
    stores.backup(url, file)
    data = file.read_bytes()
    broken = {
        "empty": b"",
        "cut off": data[:-1],
        "altered": data[:-20] + b"x" + data[-19:],
        "other": b"something else",
    }
    file.unlink()
    if damage in broken:
        file.write_bytes(broken[damage])
    elif damage == "folder":
        file.mkdir()
    for function in (stores.check, lambda place: stores.restore(place, url)):
        with pytest.raises(StoreError, match=r"not a usable backup|cannot be read"):
            function(file)
    assert found_in(url) == records()


def test_a_backup_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, file = url_of("sqlite", tmp_path), tmp_path / "b"
    fill(url)
    stores.backup(url, file)
    before = file.read_bytes()
    fill(url, given={})

    def full(handle: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="cannot be written: No space left"):
        stores.backup(url, file)
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["b", "store.db"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    url, rng = url_of(kind, tmp_path), random.Random(3)
    wholes = [{f"k{number}": bytes(20_000) for number in range(count)} for count in (3, 9)]
    files = [tmp_path / "a", tmp_path / "b"]
    for whole, file in zip(wholes, files, strict=True):
        fill(url, given=whole)
        stores.backup(url, file)
    for _ in range(2):
        command = [sys.executable, restoring.__file__, url, *map(str, files)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(1, 9)):
                process.stdout.readline()
            process.kill()
        assert stores.check(url).lack == ""
        assert found_in(url) in wholes
        assert stores.check(tmp_path / "a.again").lack == ""
