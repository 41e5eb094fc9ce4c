"""Permissions of a store on a local disk: only its user has access, from the moment of creation.

The modes are set at creation, independent of the process's umask, which all threads share. Existing files
keep the mode that the operator gave them. If other users have access, a warning names the remedy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import stat
from pathlib import Path

logger = logging.getLogger("daskserve.store")

FILE_MODE = 0o600
FOLDER_MODE = 0o700
#: The rights of everyone but the owner.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def opener(path: str, flags: int) -> int:
    """The ``opener`` of `open`: a new file is accessible to its user only."""
    return os.open(path, flags, FILE_MODE)


def create_empty(path: Path) -> None:
    """Create an empty file that only its user may access; leave an existing file as it is.

    Errors are ignored, because the next use of the file reports them.
    """
    # SQLite follows a link to a file that does not exist yet, but exclusive creation does not.
    target = os.path.realpath(path)
    with contextlib.suppress(OSError):
        try:
            # No open(): closing a file drops all locks that this process holds on it, including SQLite's.
            os.mknod(target, FILE_MODE)
        except PermissionError:  # on other systems than Linux, only root may create a file in this way
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def warn_if_shared(path: Path) -> None:
    """Log a warning with the remedy if other users have access to the file or folder of a store."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not mode & _OTHERS:
        return
    if stat.S_ISDIR(mode):
        names, recursive = [path], ["-R"]
    else:
        ends, file = ("", "-wal", "-shm"), os.path.realpath(path)
        names, recursive = [each for end in ends if (each := Path(f"{file}{end}")).exists()], []
    logger.warning(
        "Other users of this machine have access to the store %s (mode %o). A reader sees what "
        "backends were given, and a writer can run code on the workers. Unless you want that: %s",
        path,
        stat.S_IMODE(mode),
        shlex.join(["chmod", *recursive, "go=", *map(str, names)]),
    )
