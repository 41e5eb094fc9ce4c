"""Ownership of the records of an instance in a folder: the objects in ``epoch``.

::

    epoch/<epoch>     a claim; its content says by whom
          knock-<by>  another instance asks whether the owner is alive
          here-<by>   the owner's answer

Versions without ownership read only the objects named by an epoch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection

from daskserve.cluster.protocols.stores import Claim
from daskserve.cluster.store.folders import Folder

FOLDER = "epoch"
_KNOCK, _HERE = "knock-", "here-"


def named(epoch: int) -> str:
    """Return the name of the object of an epoch."""
    return f"{FOLDER}/{epoch:08d}"


class FolderClaims:
    """The claims on one instance's records.

    Parameters
    ----------
    folder
        Returns the instance's folder.
    note
        Returns the content of an object that this process creates, given its owner.
    """

    def __init__(self, folder: Callable[[], Folder], note: Callable[[str], bytes]) -> None:
        self._folder = folder
        self._note = note
        #: Owners by epoch; a claim never changes.
        self._owners: dict[int, str | None] = {}

    def names(self) -> list[str]:
        """Return the names of all objects; empty if the folder was removed."""
        try:
            return self._folder().names(FOLDER)
        except FileNotFoundError:
            return []

    def epochs(self) -> list[int]:
        """Return the claimed epochs that are listed."""
        return epochs_in(self.names())

    def create(self, epoch: int, owner: str) -> None:
        """Claim an epoch; raise `FileExistsError` if it is claimed."""
        self._folder().create(named(epoch), self._note(owner))

    def clear(self, before: int) -> None:
        """Remove older claims and all queries; an instance that still waits for an answer queries again."""
        names = self.names()
        older = [named(each) for each in epochs_in(names) if each < before]
        asked = [f"{FOLDER}/{each}" for each in names if each.startswith((_KNOCK, _HERE))]
        self._folder().remove([*older, *asked])

    def of(self, epoch: int) -> Claim:
        """Return the claim of an epoch."""
        if epoch and epoch not in self._owners:
            self._owners = {epoch: self._owner(epoch)}
        return Claim(epoch, self._owners.get(epoch))

    def _owner(self, epoch: int) -> str | None:
        try:
            found = json.loads(self._folder().read([named(epoch)])[named(epoch)])
        except (FileNotFoundError, ValueError):
            return None  # the object was lost or damaged, or a later claim has just replaced it
        owner = found.get("owner") if isinstance(found, dict) else None
        return owner if isinstance(owner, str) else None

    def answer(self, names: Collection[str]) -> None:
        """Answer the queries among the names."""
        for name in names:
            by = name.removeprefix(_KNOCK)
            if by != name and f"{_HERE}{by}" not in names:
                with contextlib.suppress(FileExistsError):
                    self._folder().create(f"{FOLDER}/{_HERE}{by}", self._note(""))

    def query_owner(self, by: str) -> bool:
        """Create a query, if there is none; return whether it has been answered."""
        names = self.names()
        if f"{_KNOCK}{by}" not in names:
            with contextlib.suppress(FileExistsError):
                self._folder().create(f"{FOLDER}/{_KNOCK}{by}", self._note(by))
        return f"{_HERE}{by}" in names

    def forget(self, by: str) -> None:
        """Remove a query and its answer."""
        self._folder().remove([f"{FOLDER}/{_KNOCK}{by}", f"{FOLDER}/{_HERE}{by}"])


def epochs_in(names: Collection[str]) -> list[int]:
    """Return the epochs among the names of objects."""
    return [int(name) for name in names if name.isdecimal()]
