"""The files of a backend's environment: packed by the client, unpacked where its replicas run.

They are part of the pickled code, before the callable, and unpickling unpacks them. So the callable can
import their modules while it is unpickled, changed files are a new version of the code, and large files
travel like large arguments.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import io
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from daskserve.common import settings
from daskserve.common.formatting import shown
from daskserve.data.replica.environment.kept_folders import DRAFT, delete_unused, hold, mark_used
from daskserve.errors import BadRequestError

#: Folders that are not packed.
LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache"})
MAX_BYTES = 512 << 20
#: Maximum total size of the unpacked files of an archive.
MAX_UNPACKED_BYTES = 8 * MAX_BYTES
#: The time of each entry, so that the same files give the same bytes.
_TIME = (1980, 1, 1, 0, 0, 0)

#: The folder of all unpacked archives, in the context of a replica; None in other processes.
archives_folder: contextvars.ContextVar[Path | None] = contextvars.ContextVar("archives_folder", default=None)


class PackedFolder:
    """The files of a folder, as the bytes of a zip archive.

    Unpickling it in a replica's process makes the files its working directory, and adds it at the front of
    the import path.
    """

    def __init__(self, archive: Any) -> None:
        self.archive = archive

    def __reduce__(self) -> tuple[Callable[[Any], PackedFolder], tuple[pickle.PickleBuffer]]:
        return _enter, (pickle.PickleBuffer(self.archive),)


def _enter(archive: Any) -> PackedFolder:
    root = archives_folder.get()
    if root is not None:
        folder = unpack(archive, root)
        hold(folder)
        sys.path.insert(0, str(folder))
        os.chdir(folder)
    return PackedFolder(archive)


def unpack(archive: Any, root: Path) -> Path:
    """Return the folder with the archive's files, below ``root``; unpack them if they are missing.

    Processes of this machine share it. It appears complete or not at all.
    """
    folder = root / f"files-{hashlib.sha256(archive).hexdigest()[:20]}"
    with contextlib.suppress(FileNotFoundError):
        mark_used(folder)
        return folder
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        tempfile.TemporaryDirectory(prefix=DRAFT, dir=root) as made,
        zipfile.ZipFile(io.BytesIO(archive)) as packed,
    ):
        size_bytes = sum(each.file_size for each in packed.infolist())
        if size_bytes > MAX_UNPACKED_BYTES:
            raise BadRequestError(
                f"The files of working_dir have {size_bytes} bytes when they are unpacked; at most "
                f"{MAX_UNPACKED_BYTES} are allowed."
            )
        draft = Path(made, "files")
        draft.mkdir(0o700)
        for each in packed.infolist():
            place = packed.extract(each, draft)
            mode = each.external_attr >> 16 & 0o777
            if mode and not each.is_dir():
                os.chmod(place, mode)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has unpacked it in the meantime
                raise
    mark_used(folder)
    delete_unused(folder, settings.process().environments_days)
    return folder


def pack_folder(place: str) -> PackedFolder:
    """Return the files of a folder or zip file, which may be a URL that fsspec opens.

    Raises
    ------
    BadRequestError
        There is no such folder or archive, or it is too large.
    """
    path = Path(place).expanduser()
    if "://" not in place and path.is_dir():
        return PackedFolder(_zip_of(path))
    try:
        import fsspec  # slow to import, and replicas do not need it

        with fsspec.open(place if "://" in place else str(path), "rb") as file:
            archive = file.read(MAX_BYTES + 1)
    except (OSError, ImportError, ValueError) as error:
        raise BadRequestError(f"working_dir={place!r} is neither a folder nor a zip file: {error}") from error
    _check_size(len(archive), place)
    if not zipfile.is_zipfile(io.BytesIO(archive)):
        raise BadRequestError(f"working_dir={place!r} is neither a folder nor a zip file.")
    return PackedFolder(archive)


def local_folder(place: str, root: Path) -> Path:
    """Return a folder on this machine with the files of a folder or zip file; see `pack_folder`.

    If an archive at a URL has only one folder at its top, as archives of repositories do, return that one.
    """
    path = Path(place).expanduser()
    if "://" not in place and path.is_dir():
        return path
    folder = unpack(pack_folder(place).archive, root)
    inside = list(folder.iterdir())
    return inside[0] if "://" in place and len(inside) == 1 and inside[0].is_dir() else folder


def _zip_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    total = 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for path in _files_in(folder):
            total += path.stat().st_size
            _check_size(total, str(folder))
            entry = zipfile.ZipInfo(str(path.relative_to(folder)), _TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            packed.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files to pack, in an order that does not depend on the file system."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        yield from (path for name in sorted(files) if (path := Path(here, name)).is_file())


def _check_size(size_bytes: int, place: str) -> None:
    if size_bytes > MAX_BYTES:
        raise BadRequestError(
            f"working_dir={place!r} has over {shown(MAX_BYTES >> 20)} MiB, the maximum; leave out what the "
            "code does not need, and read data from shared storage."
        )
