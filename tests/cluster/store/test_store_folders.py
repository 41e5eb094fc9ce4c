"""Folders of immutable objects: exclusive and atomic creation, and errors for unusable locations."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from store_harness import Crash, Trap, every_step, local_folder, make_bucket, make_renaming_files

from daskserve.cluster.store.folders import (
    ABANDONED_S,
    MAX_UNSYNCED,
    Folder,
    LocalFolder,
    RemoteFolder,
    connect,
    has_conditional_put,
    translated_errors,
)
from daskserve.cluster.store.opening import StoreError, StoreUnavailableError

pytestmark = pytest.mark.smoke


@pytest.fixture(params=["disk", "bucket", "renames"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    made: Folder
    if request.param == "disk":
        made = LocalFolder(tmp_path / "store" / "i")
    else:
        files = make_bucket() if request.param == "bucket" else make_renaming_files()
        made = RemoteFolder(files, "/store/i")
    made.prepare(["txn", "epoch"])
    made.prepare(["txn", "epoch"])
    return made


def test_objects_are_created_once_listed_read_and_removed(folder: Folder) -> None:
    assert folder.names("txn") == []
    folder.create("txn/1", b"one")
    folder.create("txn/2", b"two" * 1000)
    with pytest.raises(FileExistsError):
        folder.create("txn/1", b"other")
    assert sorted(folder.names("txn")) == ["1", "2"]
    assert folder.names("epoch") == []
    assert folder.read(["txn/2", "txn/1"]) == {"txn/1": b"one", "txn/2": b"two" * 1000}
    assert folder.read([]) == {}
    for names in (["txn/1"], ["txn/1", "txn/3"]):
        folder.remove(names)
    for missing in (["txn/1"], ["txn/2", "txn/1"]):
        with pytest.raises(FileNotFoundError):
            folder.read(missing)
    assert folder.names("txn") == ["2"]
    assert folder.names("tmp") == []


# ---- on a disk


@pytest.fixture
def disk(tmp_path: Path) -> LocalFolder:
    made = LocalFolder(tmp_path / "store" / "i")
    made.prepare(["txn", "epoch"])
    return made


def trap_disk(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> None:
    def trapped(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            trap.step(f"before {name}")
            result = real(*args)
            trap.step(f"after {name}")
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "link", "unlink", "replace"):
        trapped(name)


def test_a_crash_at_any_step_leaves_a_complete_object_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(at: int) -> bool:
        folder = LocalFolder(tmp_path / str(at) / "i")
        folder.prepare(["txn"])
        trap = Trap(at)
        with monkeypatch.context() as patch:
            trap_disk(patch, trap)
            try:
                folder.create("txn/1", b"data" * 10_000)
            except Crash:
                pass
        again = LocalFolder(tmp_path / str(at) / "i")
        again.prepare(["txn"])
        if "after link" in trap.steps:
            assert again.read(["txn/1"]) == {"txn/1": b"data" * 10_000}
        else:
            assert again.names("txn") == []
            again.create("txn/1", b"data")
        return trap.has_sprung

    assert every_step(run) >= 8  # file sync, link, unlink, folder sync: one step before and one after each


def test_an_object_is_synced_with_its_folder_before_it_counts(
    disk: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = Trap(10_000)
    trap_disk(monkeypatch, trap)
    disk.create("txn/1", b"data")
    steps = [each.removeprefix("before ") for each in trap.steps if each.startswith("before")]
    assert [each for each in steps if each != "unlink"] == ["link", "fsync", "fsync"]


def test_an_object_that_may_wait_is_synced_with_the_next_one(
    disk: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{handle}").removeprefix(f"{disk._root}/"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for number in range(MAX_UNSYNCED):
        disk.create(f"txn/{number}", b"data", may_wait=True)
    assert synced == []
    disk.remove(["txn/3"])
    disk.create("txn/last", b"data")
    assert sorted(synced) == ["txn", *(f"txn/{number}" for number in (0, 1, 2, 4, 5, 6, 7)), "txn/last"]
    synced.clear()
    disk.create("txn/more", b"data", may_wait=True)
    assert disk.names("txn").count("more") == 1
    disk.create("epoch/1", b"data")
    assert sorted(synced) == ["epoch", "epoch/1", "txn", "txn/more"]


def test_an_object_whose_sync_fails_was_not_created_for_sure(
    disk: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        disk.create("txn/1", b"data")


def test_creation_is_exclusive_without_hard_links(disk: LocalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    disk.create("txn/1", b"one")
    with pytest.raises(FileExistsError):
        disk.create("txn/1", b"two")
    assert disk.read(["txn/1"]) == {"txn/1": b"one"}
    assert disk.names("tmp") == []


def test_old_temporary_files_are_removed_and_recent_ones_are_kept(disk: LocalFolder) -> None:
    folder = disk._root / "tmp"
    (folder / "old").write_bytes(b"")
    (folder / "young").write_bytes(b"")
    before = time.time() - ABANDONED_S - 10
    os.utime(folder / "old", (before, before))
    disk.prepare(["txn"])
    assert disk.names("tmp") == ["young"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(StoreError, match="must be a folder"), translated_errors("u"):
        LocalFolder(tmp_path / "store" / "i").prepare(["txn"])


# ---- on other file systems


def test_conditional_puts_are_detected_from_the_class() -> None:
    class Conditional(AsyncFileSystem):  # type: ignore[misc]
        async def _pipe_file(
            self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any
        ) -> None: ...

    class Older(AsyncFileSystem):  # type: ignore[misc]
        async def _pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None: ...

    expected = {Conditional: True, Older: False, MemoryFileSystem: True, LocalFileSystem: False}
    assert {each: has_conditional_put(each()) for each in expected} == expected


def failing(files: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    setattr(files, name, around(getattr(files, name)))
    return files


def test_a_retried_put_that_had_succeeded_is_no_conflict() -> None:
    def twice(put: Callable[..., Any]) -> Callable[..., Any]:
        def pipe_file(path: str, data: bytes, **kwargs: Any) -> None:
            put(path, data, **kwargs)
            try:
                put(path, data, **kwargs)
            except FileExistsError as error:
                raise OSError(errno.EINVAL, "412 Precondition Failed") from error

        return pipe_file

    folder = RemoteFolder(failing(make_bucket(), "pipe_file", twice), "/store")
    folder.create("txn/1", b"one")
    with pytest.raises(FileExistsError):
        folder.create("txn/1", b"two")
    assert folder.read(["txn/1"]) == {"txn/1": b"one"}


def test_a_failed_put_raises() -> None:
    def refuse(put: Callable[..., Any]) -> Callable[..., Any]:
        def pipe_file(*args: Any, **kwargs: Any) -> None:
            raise ConnectionError("the line is down")

        return pipe_file

    folder = RemoteFolder(failing(make_bucket(), "pipe_file", refuse), "/store")
    with pytest.raises(ConnectionError):
        folder.create("txn/1", b"one")


def test_only_one_of_two_renames_to_one_name_succeeds() -> None:
    files = make_renaming_files()

    def overtaken(move: Callable[..., Any]) -> Callable[..., Any]:
        def mv(*args: Any) -> None:
            move(*args)
            files.pipe_file("/store/txn/1", b"the other's")

        return mv

    folder = RemoteFolder(failing(files, "mv", overtaken), "/store")
    with pytest.raises(FileExistsError, match="by another writer at the same time"):
        folder.create("txn/1", b"one")


def test_wildcards_in_a_path_are_literal(tmp_path: Path) -> None:
    folder = RemoteFolder(make_bucket(), "/st[o]re*")
    for name in ("txn/1", "txn/2", "txn/3"):
        folder.create(name, b"data")
    folder.remove(["txn/1", "txn/2"])
    assert folder.names("txn") == ["3"]
    folder.create("txn/4", b"more")
    assert folder.read(["txn/3", "txn/4"]) == {"txn/3": b"data", "txn/4": b"more"}


# ---- by URL


def test_local_urls_open_a_local_folder(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/store", f"local://{tmp_path}/store/", f"dir::file://{tmp_path}/store"):
        folder = connect(url, "i")
        assert isinstance(folder, LocalFolder), url
        assert folder._root == tmp_path / "store" / "i"


def test_other_urls_open_a_remote_folder() -> None:
    folder = connect("dir::memory://store/of/mine", "i")
    assert isinstance(folder, RemoteFolder)
    assert folder._root == "/store/of/mine/i"


def test_unusable_urls_are_refused_with_the_reason() -> None:
    for url, reason in [
        ("simplecache::memory://store", "is behind a cache; use the URL of the file system behind it"),
        ("file:///", "names no folder; add a path"),
        ("lakefs://repo/branch", "needs a package that is not installed in the scheduler's .*lakefs"),
    ]:
        with pytest.raises(StoreError, match=reason):
            connect(url, "i")


def test_errors_are_translated_and_name_the_store() -> None:
    for error, expected in [
        (PermissionError("no"), StoreError),
        (NotImplementedError(), StoreError),
        (FileNotFoundError("the bucket"), StoreError),
        (ConnectionError("down"), StoreUnavailableError),
        (OSError(errno.ENOSPC, "full"), StoreUnavailableError),
        (RuntimeError("a foreign library's own"), StoreUnavailableError),
        (FileExistsError(), FileExistsError),
        (StoreError("already translated"), StoreError),
    ]:
        with pytest.raises(expected) as caught, translated_errors("scheme://there"):
            raise error
        if caught.value is not error:
            assert "scheme://there" in str(caught.value), error
            assert type(error).__name__ in str(caught.value), error


def test_an_object_that_is_removed_while_it_is_made_durable_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer claim may remove older claims at any moment."""
    folder = local_folder(tmp_path)
    folder.prepare(["epoch"])
    publish = folder._publish

    def remove_at_once(temporary: Path, path: Path) -> None:
        publish(temporary, path)
        path.unlink()

    monkeypatch.setattr(folder, "_publish", remove_at_once)
    folder.create("epoch/00000001", b"1")
    assert folder.names("epoch") == []
