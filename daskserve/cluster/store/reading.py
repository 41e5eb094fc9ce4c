"""Reading the journal of a folder: finding its objects, decoding them, and copying damaged ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.cluster.store.folders import Folder
from daskserve.cluster.store.journal import (
    DamagedError,
    Journal,
    JournalEntry,
    Position,
    Snapshot,
    decode_change,
    decode_snapshot,
    replay,
)

#: Attempts at an operation that another process may interrupt.
ATTEMPTS = 8


def read_journal(url: str, folder: Folder, *, keeps_copies: bool = True) -> tuple[Journal, JournalReader]:
    """Return the journal in a folder, and its reader, which lists damaged and missing objects.

    Raises
    ------
    StoreUnavailableError Other processes compact it repeatedly.
    """
    for _ in range(ATTEMPTS):
        snapshots = positions_in(folder, "snapshot")
        changes = positions_in(folder, "txn")
        reader = JournalReader(url, folder, keeps_copies=keeps_copies)
        try:
            return reader.read(snapshots, changes), reader
        except FileNotFoundError:
            # Another process has just compacted the journal, and its snapshot covers the removed objects.
            continue
    raise StoreUnavailableError(f"The store {url} changes faster than it can be read; retry later.")


def positions_in(folder: Folder, name: str) -> list[Position]:
    """Return the positions of the objects in ``txn`` or ``snapshot``, in their order."""
    parsed = (Position.parse(each) for each in folder.names(name))
    return sorted(position for position in parsed if position is not None)


class JournalReader:
    """One attempt to read a journal.

    Attributes
    ----------
    problems : dict
        Unreadable objects by name, each with the reason and the place of a copy.
    missing : list of str
        The missing changes on which others build.

    Parameters
    ----------
    keeps_copies : bool
        Whether copies of unreadable objects are kept in the folder.
    """

    def __init__(self, url: str, folder: Folder, *, keeps_copies: bool = True) -> None:
        self._url = url
        self._folder = folder
        self._keeps_copies = keeps_copies
        self.problems: dict[str, str] = {}
        self.missing: list[str] = []

    def read(self, snapshots: Sequence[Position], changes: Sequence[Position]) -> Journal:
        """Return the journal that the listed snapshots and changes form.

        Raises
        ------
        FileNotFoundError
            A listed object is gone: another process has just compacted the journal.
        """
        base = self._best_snapshot(snapshots)
        later = [each for each in changes if base is None or each > base.position]
        decoded, size = self._read_changes(later)
        history = replay(base, decoded)
        there = {*snapshots, *changes}
        self.missing = [each.name for each in history.builds_on if each not in there]
        for name in self._names("aside"):
            original = name.replace("=", "/", 1)
            self.problems.setdefault(original, f"An earlier start could not read it; see aside/{name}.")
        numbers: dict[int, int] = {}
        for epoch, number in (*snapshots, *changes):
            numbers[epoch] = max(number, numbers.get(epoch, 0))
        return Journal(
            history.records,
            history.last,
            numbers,
            sound=base.position if base is not None and not base.damaged else None,
            objects=len(later),
            size=size,
            state_size=sum(len(key) + len(value) for key, value in history.records.items()),
        )

    def _best_snapshot(self, positions: Sequence[Position]) -> Snapshot | None:
        """Return the newest undamaged snapshot, or the readable part of the newest one."""
        salvaged = None
        for position in reversed(positions):
            name = f"snapshot/{position.name}"
            data = self._folder.read([name])[name]
            try:
                snapshot = decode_snapshot(self._url, data)
            except DamagedError as error:
                self._keep_aside(name, data, f"The snapshot cannot be read: {error}.")
                continue
            if not snapshot.damaged:
                return snapshot
            what = ", ".join(snapshot.damaged)
            self._keep_aside(name, data, f"The snapshot is damaged; unreadable: {what}.")
            salvaged = salvaged or snapshot
        return salvaged

    def _read_changes(self, positions: Sequence[Position]) -> tuple[list[JournalEntry], int]:
        decoded = []
        size = 0
        contents = self._folder.read([f"txn/{each.name}" for each in positions])
        for name, data in contents.items():
            size += len(data)
            try:
                decoded.append(decode_change(self._url, data))
            except DamagedError as error:
                reason = f"The change cannot be read: {error}."
                if name == f"txn/{positions[-1].name}":
                    reason += " It is the newest, so its write was probably cut off and never acknowledged."
                self._keep_aside(name, data, reason)
        return decoded, size

    def _names(self, folder: str) -> list[str]:
        try:
            return self._folder.names(folder)
        except FileNotFoundError:
            return []  # a copied store may lack empty folders

    def _keep_aside(self, name: str, data: bytes, reason: str) -> None:
        if not self._keeps_copies:
            self.problems[name] = reason
            return
        copy = f"aside/{name.replace('/', '=')}"
        with contextlib.suppress(FileExistsError):  # an earlier start has already made the copy
            self._folder.create(copy, data)
        self.problems[name] = f"{reason} A copy is kept as {copy}."
