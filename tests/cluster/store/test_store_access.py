"""Only its user may access the files of a store on a disk, and wider modes are reported."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_harness import commit, compact, opened

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store.access import create_empty
from daskserve.cluster.store.folders import LocalFolder
from daskserve.cluster.store.opening import open_store

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Set a umask that removes no permissions."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes_by_name(folder: Path) -> dict[str, int]:
    return {path.name: mode(path) for path in folder.iterdir()}


def modes_below(folder: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), mode(path)) for path in (folder, *folder.rglob("*"))}


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "have access to" in each.getMessage()]


async def use(url: str, *, compacts: bool = False) -> None:

    async with opened(open_store(url, "i")) as store:
        await commit(store, 1, a=b"secret")
        if compacts:
            await compact(store)


def test_a_database_and_its_log_are_their_users_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.db"
    seen: list[int] = []
    real = sqlite3.connect

    def connect(target: Any, *args: Any, **options: Any) -> Any:
        seen.append(mode(Path(target)))
        return real(target, *args, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)

    async def main() -> None:
        async with opened(open_store(f"sqlite:///{path}", "i")) as store:
            await commit(store, 1, a=b"secret")
            assert modes_by_name(tmp_path) == {"s.db": 0o600, "s.db-wal": 0o600, "s.db-shm": 0o600}

    asyncio.run(main())
    assert set(seen) == {0o600}
    assert reports(caplog) == []


async def test_a_rewritten_database_is_readable_only_by_its_user(tmp_path: Path) -> None:
    path = tmp_path / "f" / "s.db"
    path.parent.mkdir(0o700)
    async with opened(open_store(f"sqlite:///{path}", "i")) as store:
        await commit(store, 1, a=b"1")
        path.parent.rename(tmp_path / "moved")
        await store.rewrite(1, StoreChange({"a": b"2"}))
        assert modes_below(path.parent) == {(True, 0o700), (False, 0o600)}


async def test_a_database_behind_a_link_is_its_users_only_and_takes_changes(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(0o755)
    (tmp_path / "link.db").symlink_to(tmp_path / "disk" / "real.db")
    for _ in range(2):
        await use(f"sqlite:///{tmp_path}/link.db")
        assert mode(tmp_path / "disk" / "real.db") == 0o600


def test_without_the_right_to_make_nodes_an_empty_file_is_opened_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "mknod", refuse)
    create_empty(tmp_path / "new")
    assert mode(tmp_path / "new") == 0o600
    (tmp_path / "old").write_text("kept")
    create_empty(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


async def test_a_folder_and_its_objects_are_their_users_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await use(f"file://{tmp_path}/store", compacts=True)
    assert list((tmp_path / "store" / "i" / "snapshot").iterdir())
    assert modes_below(tmp_path / "store") == {(True, 0o700), (False, 0o600)}
    assert reports(caplog) == []


def test_objects_without_hard_links_are_their_users_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalFolder(tmp_path / "store" / "i")
    folder.prepare(["txn"])

    def fail(*args: Any) -> None:
        raise OSError("no links here")

    seen: list[int] = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        seen.extend([mode(source), mode(target)])
        real(source, target)

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "replace", replace)
    folder.create("txn/1", b"secret")
    assert [*seen, mode(tmp_path / "store" / "i" / "txn" / "1")] == [0o600] * 3


async def test_the_mode_of_an_existing_database_stays_and_is_reported_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.db"
    await use(f"sqlite:///{path}")
    path.chmod(0o640)
    assert reports(caplog) == []
    await use(f"sqlite:///{path}")
    assert mode(path) == 0o640
    (text,) = reports(caplog)
    assert f"the store {path} (mode 640)" in text
    assert text.endswith(f"chmod go= {path} {path}-wal {path}-shm")


async def test_the_mode_of_an_existing_folder_stays_and_is_reported_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store" / "i"
    root.mkdir(0o755, parents=True)
    with caplog.at_level(logging.WARNING):
        await use(f"file://{tmp_path}/store")
    assert mode(root) == 0o755
    (text,) = reports(caplog)
    assert text.endswith(f"chmod -R go= {root}")
