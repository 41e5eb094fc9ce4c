"""What a store raises, named by what its owner can do about it."""

from __future__ import annotations

import re

from daskserve.errors import InstanceError, StaleEpochError, UnavailableError


class StoreError(InstanceError):
    """The store cannot be used as it is; somebody has to change the URL or the place it names."""


class StoreFormatError(StoreError):
    """A newer daskserve wrote the store."""


class StoreUnavailableError(UnavailableError):
    """The store cannot be reached at the moment; the same call may succeed later."""


def stale(epoch: int, newest: int) -> StaleEpochError:
    """Return the error for a commit of an epoch that has been replaced."""
    return StaleEpochError(f"Controller epoch {epoch} was replaced by epoch {newest}; its change is refused.")


def check_format(url: str, found: int, reads: int) -> None:
    """Refuse a store of a newer format.

    Raises
    ------
    StoreFormatError
        With what was found, what this daskserve reads, and what to do.
    """
    if found > reads:
        raise StoreFormatError(
            f"The store {url} has format {found}; this daskserve reads formats up to {reads}. Install the "
            "daskserve that wrote it, or a newer one, or name another store; nothing in it was changed."
        )


def without_password(url: str) -> str:
    """Return a URL that may be shown and logged."""
    return re.sub(r"//([^/@:]*):[^/]*@", r"//\1:***@", url)
