"""Errors of the stores, named by what the operator can do about them."""

from __future__ import annotations

import errno
import re

from daskserve.errors import InstanceError, StaleEpochError, UnavailableError


class StoreError(InstanceError):
    """The store cannot be used until its URL, or the location that the URL names, is fixed."""


class StoreIncompleteError(StoreError):
    """Records are missing, for example because the store is an incomplete copy."""


class StoreFormatError(StoreError):
    """A newer version of daskserve wrote the store."""


class StoreUnavailableError(UnavailableError):
    """The store is temporarily unreachable; the same call may succeed later."""


#: The operating system's errors for a full disk, and for a disk that cannot be written.
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EROFS,)


def stale(epoch: int, newest: int) -> StaleEpochError:
    """Return the error for a commit from a replaced epoch."""
    return StaleEpochError(f"Controller epoch {epoch} was replaced by epoch {newest}; its change is refused.")


def stale_claim(after: int, newest: int) -> StaleEpochError:
    """Return the error for a claim after an epoch that is not the newest."""
    return StaleEpochError(f"Epoch {after} is no longer the newest; epoch {newest} is.")


def check_format(url: str, found: int, reads: int) -> None:
    """Raise an error if a store has a newer format than this version reads.

    Raises
    ------
    StoreFormatError
        The format is newer. The message names both formats and the remedy.
    """
    if found > reads:
        raise StoreFormatError(
            f"The store {url} has format {found}; this daskserve reads formats up to {reads}. Install the "
            "version that wrote it, or a newer one, or use another store. The store was not changed."
        )


def without_password(url: str) -> str:
    """Return the URL with its password masked, for messages and logs."""
    return re.sub(r"//([^/@:]*):[^/]*@", r"//\1:***@", url)
