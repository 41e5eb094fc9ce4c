"""Folders that a machine keeps for later replicas, and deletes once they are unused for a long time.

The modification time of a folder is the time of its last use. A process that uses a folder holds a shared
lock on it until the process ends, so that a folder in use is kept, regardless of its age.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
from pathlib import Path

from daskserve.common.formatting import shown

logger = logging.getLogger("daskserve.replica")

#: The prefix of the names of incomplete folders.
DRAFT = "draft-"
#: The names of daskserve's folders among the environments; other programs may also use the folder of
#: environments.
_OURS = re.compile(rf"(files-)?[0-9a-f]{{20}}|{DRAFT}.*")
_DAY_S = 86400


def hold(folder: Path) -> int | None:
    """Keep a folder from being deleted until this process ends, or closes the returned descriptor."""
    with contextlib.suppress(OSError):  # a file system without locks
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None


def mark_used(folder: Path) -> None:
    """Record that a folder is used now; raise `OSError` if it does not exist."""
    os.utime(folder)


def delete_unused(new: Path, days: float | None) -> None:
    """Delete the folders beside a new one that have been unused for ``days``; None keeps all."""
    if days is None:
        return
    oldest = new.stat().st_mtime - days * _DAY_S
    for folder in new.parent.iterdir():
        # Another process may delete the folder first, or a replica may use it.
        with contextlib.suppress(OSError):
            if _OURS.fullmatch(folder.name) and folder.is_dir() and folder.stat().st_mtime < oldest:
                _delete(folder)
                logger.info("Deleted %s, which no replica has used for %s days", folder, shown(days))


def _delete(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Rename the folder first, so that no process finds an incomplete one.
        doomed = folder.with_name(f"{DRAFT}{folder.name.removeprefix(DRAFT)}-{os.getpid()}")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    finally:
        os.close(descriptor)
