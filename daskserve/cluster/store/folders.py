"""Folders of immutable objects: everything the journal needs from a file system.

Creation is atomic and exclusive: an object appears complete or not at all, is never rewritten, and is created
only if its name is free. The implementation depends on the file system:

1. On a disk (`LocalFolder`): the object is written under a temporary name, then *hard-linked* to its final
   name; then the object and the folder are synced, both at once, because each sync may take long. A rename is
   also atomic, but silently replaces an existing file; a link fails. On file systems without hard links, an
   empty file first reserves the name, and the object is renamed over it. A crash in between, or a power loss
   before the sync, leaves an empty or cut-off object that was not acknowledged, which the journal ignores.
2. On an object store (`RemoteFolder` on S3, GCS, Azure and other file systems that implement fsspec's
   ``mode="create"``): one conditional put. Puts are atomic there.
3. On any other file system of fsspec (HDFS, SFTP, SMB): the object is written under a temporary name, then
   renamed if its name is free. The check and the rename are two steps, so two writers that race for one name
   may both believe they won. Reading the object back makes that window short.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from daskserve.cluster.store.access import FOLDER_MODE, opener, warn_if_shared
from daskserve.cluster.store.errors import READ_ONLY, StoreError, StoreUnavailableError, without_password
from daskserve.errors import ServeError

TEMPORARY = "tmp"
#: Maximum number of objects that wait to be synced together with a later one.
MAX_UNSYNCED = 8
#: A temporary file older than this has no live writer.
ABANDONED_S = 3600.0


class Folder(Protocol):
    """A store of objects by name, such as ``txn/00000001-0000000001``. Its methods block."""

    def prepare(self, folders: Sequence[str]) -> None:
        """Create the given folders; raise `StoreError` if objects cannot be stored here."""

    def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
        """Create an object, durable once this returns; raise `FileExistsError` if its name is taken.

        An object with ``may_wait`` is durable once a later object without ``may_wait`` is durable.
        """

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of objects; raise `FileNotFoundError` if one is missing."""

    def has(self, name: str) -> bool:
        """Return whether an object exists."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder, without the folder's path."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; a missing object is no error."""

    def close(self) -> None:
        """Release all resources."""


class LocalFolder:
    """A `Folder` on a local disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        #: Objects that are written and not synced yet.
        self._unsynced: list[Path] = []

    def prepare(self, folders: Sequence[str]) -> None:
        # The instance's folder and its parent, the store's folder, are created here, but no folder above
        # them.
        base = self._root.parent
        if not base.parent.is_dir():
            raise StoreError(
                f"The store cannot be opened: there is no folder {base.parent} on the scheduler's machine. "
                "Create it or use another folder."
            )
        parents = set()
        for path in (base, self._root, *(self._root / each for each in (*folders, TEMPORARY))):
            if not path.is_dir():
                with contextlib.suppress(FileExistsError):
                    path.mkdir(FOLDER_MODE)
                parents.add(path.parent)
        _sync_together(sorted(parents))
        self._clear_temporary()
        warn_if_shared(self._root)

    def _clear_temporary(self) -> None:
        """Remove the files of dead writers; a recent file may belong to a live one."""
        for left in (self._root / TEMPORARY).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()

    def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
        path = self._root / name
        temporary = self._root / TEMPORARY / uuid.uuid4().hex
        try:
            with open(temporary, "xb", opener=opener) as file:
                file.write(data)
            self._publish(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # a later `prepare` removes it
                temporary.unlink()
        before = self._unsynced
        if may_wait and len(before) < MAX_UNSYNCED:
            before.append(path)
            return
        _sync_together([*before, path, *{each.parent for each in (*before, path)}])
        before.clear()

    def _publish(self, temporary: Path, path: Path) -> None:
        try:
            os.link(temporary, path)
            return
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError:
            pass  # this file system has no hard links
        with open(path, "xb", opener=opener):
            pass
        os.replace(temporary, path)

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        return {name: (self._root / name).read_bytes() for name in names}

    def has(self, name: str) -> bool:
        return (self._root / name).exists()

    def names(self, folder: str) -> list[str]:
        return os.listdir(self._root / folder)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def close(self) -> None:
        pass  # the operating system writes unsynced data later


def _sync_together(paths: Sequence[Path]) -> None:
    """Sync files and folders concurrently, because each sync may take long.

    Paths that another process has removed in the meantime need no sync.
    """
    errors: list[BaseException] = []

    def run(path: Path) -> None:
        try:
            sync(path)
        except FileNotFoundError:
            pass
        except BaseException as error:
            # This is the top level of a thread: every error is passed to the caller.
            errors.append(error)

    if not paths:
        return
    # Daemons, because a hanging file system must not keep the scheduler from exiting.
    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in paths[1:]]
    for each in threads:
        each.start()
    run(paths[0])
    for each in threads:
        each.join()
    if errors:
        raise errors[0]


def sync(path: Path) -> None:
    """Sync a file, or a folder, so that the names in it are durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RemoteFolder:
    """A `Folder` on any file system of fsspec.

    Parameters
    ----------
    files
        The `fsspec.AbstractFileSystem`.
    root : str
        The folder's path there, without the scheme.
    """

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self._is_exclusive = has_conditional_put(files)
        # fsspec expands these characters as patterns when it gets several paths at once.
        self._takes_many = not set("*?[") & set(self._root)

    def prepare(self, folders: Sequence[str]) -> None:
        if not self._is_exclusive:
            for each in (*folders, TEMPORARY):
                self._files.makedirs(self._path(each), exist_ok=True)

    def create(self, name: str, data: bytes, *, may_wait: bool = False) -> None:
        path = self._path(name)
        try:
            if self._is_exclusive:
                self._files.pipe_file(path, data, mode="create")
                return
            self._rename_into_place(path, data)
        except Exception as error:
            # Libraries raise different errors for an existing object. The existing object may also be our
            # own, because many libraries retry a put whose answer is late.
            found = self._find(path)
            if found is None:
                raise
            if found != data:
                raise FileExistsError(f"{path} exists") from error
            return
        if self._find(path) != data:
            raise FileExistsError(f"{path} was created by another writer at the same time")

    def _rename_into_place(self, path: str, data: bytes) -> None:
        temporary = self._path(f"{TEMPORARY}/{uuid.uuid4().hex}")
        self._files.pipe_file(temporary, data)
        if self._files.exists(path):
            self._files.rm_file(temporary)
            raise FileExistsError(f"{path} exists")
        self._files.mv(temporary, path)

    def _find(self, path: str) -> bytes | None:
        self._files.invalidate_cache()
        try:
            return bytes(self._files.cat_file(path))
        except FileNotFoundError:
            return None

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        self._files.invalidate_cache()
        if not self._takes_many or len(names) < 2:
            return {name: bytes(self._files.cat_file(self._path(name))) for name in names}
        found = self._files.cat([self._path(name) for name in names], on_error="return")
        contents: dict[str, bytes] = {}
        for name in names:
            data = found.get(self._path(name), FileNotFoundError(name))
            if isinstance(data, BaseException):
                raise data
            contents[name] = bytes(data)
        return contents

    def has(self, name: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._path(name)))

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []  # object stores have no empty folders
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def remove(self, names: Sequence[str]) -> None:
        if self._takes_many and len(names) > 1:
            try:
                self._files.rm([self._path(name) for name in names])
                return
            except FileNotFoundError:
                pass  # another process has removed some of them; remove the rest one by one
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def close(self) -> None:
        self._files.invalidate_cache()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def has_conditional_put(files: Any) -> bool:
    """Return whether a file system implements ``pipe_file(mode="create")``, an atomic conditional put."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    is_async = isinstance(files, AsyncFileSystem)
    put = type(files)._pipe_file if is_async else type(files).pipe_file
    base = AsyncFileSystem._pipe_file if is_async else AbstractFileSystem.pipe_file
    return put is not base and "mode" in inspect.signature(put).parameters


def connect(url: str, instance_folder: str) -> Folder:
    """Return the folder of one instance at a URL that fsspec supports; raises as `locate` does."""
    files, path, is_local = locate(url)
    if is_local:
        return LocalFolder(Path(path) / instance_folder)
    return RemoteFolder(files, f"{path.rstrip('/')}/{instance_folder}")


def folders_at(url: str) -> list[str]:
    """Return the names at a URL: the folders of instances, and perhaps others."""
    files, path, _ = locate(url)
    try:
        found = files.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted(str(each).rstrip("/").rpartition("/")[2] for each in found)


def locate(url: str) -> tuple[Any, str, bool]:
    """Return the file system of a URL, the path in it, and whether it is a local disk.

    Raises
    ------
    StoreError
        The scheme's package is not installed, the URL has no path, or a cache is in front of the file system.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.cached import CachingFileSystem
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    shown = without_password(url)
    try:
        files, path = url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        raise StoreError(
            f"The store {shown} needs a package that is not installed in the scheduler's Python environment: "
            f"{error}"
        ) from error
    while isinstance(files, DirFileSystem):
        files, path = files.fs, files.path
    if isinstance(files, CachingFileSystem):
        raise StoreError(f"The store {shown} is behind a cache; use the URL of the file system behind it.")
    if not path.strip("/"):
        raise StoreError(f"The store {shown} names no folder; add a path.")
    return files, path, isinstance(files, LocalFileSystem)


#: Errors that a retry does not fix.
PERMANENT = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    NotImplementedError,
)


@contextlib.contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Translate the errors of a file system into those of a store; `FileExistsError` is raised unchanged."""
    try:
        yield
    except (ServeError, FileExistsError):
        raise
    except Exception as error:
        if isinstance(error, PERMANENT) or getattr(error, "errno", None) in READ_ONLY:
            raise StoreError(
                f"The store {url} cannot be used ({type(error).__name__}: {error}). It must be a folder that "
                "the scheduler can read and write: fix its permissions or use another folder."
            ) from error
        raise StoreUnavailableError(
            f"The store {url} cannot be reached: {type(error).__name__}: {error}"
        ) from error
