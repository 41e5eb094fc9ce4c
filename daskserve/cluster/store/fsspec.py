"""Records in a folder of any file system that fsspec knows, as a journal of immutable objects.

::

    <root>/<instance>/format/<n>                 the format, and whose folder this is
                      epoch/<epoch>              claimed by whoever made it
                      txn/<epoch>-<number>       one commit
                      snapshot/<epoch>-<number>  all records as of that commit
                      aside/...                  copies of what could not be read

Such file systems have no transactions; all this needs of them is in `daskserve.cluster.store.folders`: an
object appears whole, and is only made if there is none of its name. From that follows:

* A commit is one object. Once it returned it is durable (synced on a disk, accepted by an object store).
* The fence: an epoch belongs to the one process that made its object. A commit looks for newer epochs before
  it writes *and after*, and only succeeds if there is none. So if a commit succeeded, its object was there
  before the next epoch's, and whoever claimed that epoch finds it when it loads. A controller that was
  replaced while it wrote is told so, and the chain of positions (`daskserve.cluster.store.journal`) keeps
  what it left behind out of the history as soon as its successor has written anything. This is exact where
  making an object is exclusive and lists are up to date: disks, NFS, S3, GCS, Azure. On the rest (SFTP, SMB)
  two processes that claim an epoch within the same moment could both get it. Within one scheduler process
  the fence is exact everywhere.
* A commit whose outcome is not known (the connection broke) raises, and its number is not used again; the
  next commit builds on the one before it, which makes the lost one void even if it arrives late.

The journal is cut short by a snapshot when it has grown past what the records themselves take, so that the
work stays in proportion to what is written. A snapshot only ever lets go of what the snapshot *before* it
covers: if the newest one turns out to be damaged, everything is still there. Snapshots first, then changes
are removed, and reading lists them in that order, so a crash or a reader at any point sees a whole history.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from daskserve.cluster.store.errors import StoreUnavailableError, check_format, stale
from daskserve.cluster.store.folders import Folder, connect, explained
from daskserve.cluster.store.journal import (
    FORMAT,
    Change,
    DamagedError,
    Position,
    Snapshot,
    decode_change,
    decode_snapshot,
    encode_change,
    encode_snapshot,
    replay,
)
from daskserve.cluster.store.thread import ThreadedStore
from daskserve.types import InstanceName

FOLDERS = ("format", "epoch", "txn", "snapshot", "aside")
#: Tries, where another process may get in between.
ATTEMPTS = 8
#: The journal is cut short when it has grown by this much more than what a snapshot costs to write.
COMPACT_BYTES = 1 << 20
COMPACT_OBJECTS = 512
#: One object more for so many bytes of records: the share of a snapshot that every commit pays for.
BYTES_PER_OBJECT = 4096
#: Objects removed in one go, between which commits get their turn.
REMOVE_AT_ONCE = 64


def folder_of(instance: InstanceName) -> str:
    """Return the name of an instance's folder: one path segment that every file system takes."""
    return quote(instance, safe="").replace(".", "%2E").replace("%", "=") or "="


@dataclass(slots=True)
class _Journal:
    """What this process knows of the folder; forgotten when another one may have written there.

    Attributes
    ----------
    numbers : dict
        The highest number of a change in each epoch, whatever became of that change.
    sound : Position or None
        Where the newest snapshot without damage is.
    objects, size : int
        Changes since that snapshot, and their bytes.
    state_size : int
        The bytes of all records, so about those of the next snapshot.
    """

    records: dict[str, bytes]
    last: Position
    numbers: dict[int, int]
    sound: Position | None
    objects: int
    size: int
    state_size: int

    @property
    def is_long(self) -> bool:
        """Whether a snapshot is worth what it costs."""
        return (
            self.objects > COMPACT_OBJECTS + self.state_size // BYTES_PER_OBJECT
            or self.size > COMPACT_BYTES + self.state_size
        )

    def add(self, change: Change, size: int) -> None:
        """Take in a change that has been written."""
        self.last = change.position
        self.objects += 1
        self.size += size
        for key, value in change.records.items():
            if key in self.records:
                self.state_size -= len(key) + len(self.records.pop(key))
            if value is not None:
                self.records[key] = value
                self.state_size += len(key) + len(value)


class FsspecStore(ThreadedStore):
    """See `daskserve.cluster.base.InstanceStore`, and the module for what it guarantees.

    Parameters
    ----------
    connect : callable, optional
        Takes the URL and the name of the instance's folder, and returns that folder; called in the store's
        thread.
    """

    def __init__(
        self, url: str, instance: InstanceName, connect: Callable[[str, str], Folder] = connect
    ) -> None:
        super().__init__(url, instance)
        self._connect = lambda: connect(url, folder_of(instance))
        self._writer = uuid.uuid4().hex
        self._connected: Folder | None = None
        self._seen_epoch = 0
        self._journal: _Journal | None = None

    @property
    def _folder(self) -> Folder:
        assert self._connected is not None
        return self._connected

    # Lifecycle

    def do_open(self) -> None:
        with explained(self.url):
            self._connected = self._connect()
            self._folder.prepare(FOLDERS)
            if not self._check_format():
                with contextlib.suppress(FileExistsError):  # somebody else opens it at the same time
                    self._folder.create(f"format/{FORMAT:08d}", self._note())

    def do_close(self) -> None:
        self._journal = None
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _check_format(self) -> bool:
        found = [int(name) for name in self._folder.names("format") if name.isdecimal()]
        if found:
            check_format(self.url, max(found), FORMAT)
        return bool(found)

    def _note(self) -> bytes:
        return json.dumps({"instance": self.instance, "writer": self._writer}).encode()

    # Reading

    def do_load(self) -> Mapping[str, bytes]:
        with explained(self.url):
            self._look_for_epochs()
            return dict(self._known().records)

    def _known(self) -> _Journal:
        if self._journal is None:
            self._journal = self._read()
        return self._journal

    def _read(self) -> _Journal:
        for _ in range(ATTEMPTS):
            snapshots = self._positions("snapshot")
            changes = self._positions("txn")
            try:
                return self._read_objects(snapshots, changes)
            except FileNotFoundError:
                # Another process has just cut the journal short; what it removed is in its snapshot.
                continue
        raise StoreUnavailableError(f"The store {self.url} changes faster than it can be read; try again.")

    def _positions(self, folder: str) -> list[Position]:
        parsed = (Position.parse(name) for name in self._folder.names(folder))
        return sorted(position for position in parsed if position is not None)

    def _read_objects(self, snapshots: list[Position], changes: list[Position]) -> _Journal:
        problems: dict[str, str] = {}
        base = self._best_snapshot(snapshots, problems)
        later = [each for each in changes if base is None or each > base.position]
        decoded, size = self._read_changes(later, problems)
        history = replay(base, decoded)
        for name in self._folder.names("aside"):
            original = name.replace("=", "/", 1)
            problems.setdefault(original, f"It could not be read at an earlier start; see aside/{name}.")
        self.report_problems(problems)
        numbers: dict[int, int] = {}
        for epoch, number in (*snapshots, *changes):
            numbers[epoch] = max(number, numbers.get(epoch, 0))
        return _Journal(
            history.records,
            history.last,
            numbers,
            sound=base.position if base is not None and not base.damaged else None,
            objects=len(later),
            size=size,
            state_size=sum(len(key) + len(value) for key, value in history.records.items()),
        )

    def _read_changes(self, positions: list[Position], problems: dict[str, str]) -> tuple[list[Change], int]:
        decoded = []
        size = 0
        contents = self._folder.read([f"txn/{each.name}" for each in positions])
        for name, data in contents.items():
            size += len(data)
            try:
                decoded.append(decode_change(self.url, data))
            except DamagedError as error:
                reason = f"The change cannot be read: {error}."
                if name == f"txn/{positions[-1].name}":
                    reason += " It is the newest, so probably one that was cut off and never acknowledged."
                self._keep_aside(name, data, reason, problems)
        return decoded, size

    def _best_snapshot(self, positions: list[Position], problems: dict[str, str]) -> Snapshot | None:
        """Return the newest snapshot without damage, or else what is left of the newest."""
        salvaged = None
        for position in reversed(positions):
            name = f"snapshot/{position.name}"
            data = self._folder.read([name])[name]
            try:
                snapshot = decode_snapshot(self.url, data)
            except DamagedError as error:
                self._keep_aside(name, data, f"The snapshot cannot be read: {error}.", problems)
                continue
            if not snapshot.damaged:
                return snapshot
            what = ", ".join(snapshot.damaged)
            self._keep_aside(name, data, f"The snapshot is damaged; it cannot be read: {what}.", problems)
            salvaged = salvaged or snapshot
        return salvaged

    def _keep_aside(self, name: str, data: bytes, reason: str, problems: dict[str, str]) -> None:
        copy = f"aside/{name.replace('/', '=')}"
        with contextlib.suppress(FileExistsError):  # an earlier start kept it
            self._folder.create(copy, data)
        problems[name] = f"{reason} A copy is kept as {copy}."

    # Writing

    def do_commit(self, epoch: int, records: Mapping[str, bytes | None]) -> None:
        with explained(self.url):
            self._refuse_stale(epoch)
            if epoch > self._seen_epoch:
                self._take_epoch(epoch)
            if not records:
                return
            for _ in range(ATTEMPTS):
                try:
                    journal = self._append(epoch, records)
                except FileExistsError:
                    self._journal = None  # another process writes with this epoch; its changes come first
                    continue
                if journal.is_long:
                    self.post(self.do_compact)
                return
        raise StoreUnavailableError(f"Another process writes in the store {self.url}; try again.")

    def _append(self, epoch: int, records: Mapping[str, bytes | None]) -> _Journal:
        journal = self._known()
        if epoch < journal.last.epoch:
            self._seen_epoch = journal.last.epoch
            raise stale(epoch, self._seen_epoch)
        number = journal.numbers.get(epoch, 0) + 1
        journal.numbers[epoch] = number  # used up, whatever becomes of this
        change = Change(Position(epoch, number), journal.last, records)
        data = encode_change(change, self._writer)
        self._folder.create(f"txn/{change.position.name}", data)
        self._refuse_stale(epoch)
        journal.add(change, len(data))
        return journal

    # Epochs

    def do_newest_epoch(self) -> int:
        with explained(self.url):
            return self._look_for_epochs()

    def do_claim_epoch(self) -> int:
        with explained(self.url):
            self._check_format()
            # The objects of the epochs may have got lost; what was written tells too.
            written = max(
                (each.epoch for each in (*self._positions("txn"), *self._positions("snapshot"))), default=0
            )
            for _ in range(ATTEMPTS):
                claimed = max(written, self._look_for_epochs()) + 1
                if self._take_epoch(claimed) and self._look_for_epochs() == claimed:
                    # The newest object alone says which epochs are over.
                    older = [each for each in self._listed_epochs() if each < claimed]
                    self._folder.remove([f"epoch/{each:08d}" for each in older])
                    return claimed
        raise StoreUnavailableError(
            f"Other processes keep claiming epochs in the store {self.url}; try again."
        )

    def _take_epoch(self, epoch: int) -> bool:
        """Make an epoch this process's own; return False if another one has it."""
        try:
            self._folder.create(f"epoch/{epoch:08d}", self._note())
        except FileExistsError:
            self._look_for_epochs()
            return False
        self._seen_epoch = epoch
        return True

    def _listed_epochs(self) -> list[int]:
        return [int(name) for name in self._folder.names("epoch") if name.isdecimal()]

    def _look_for_epochs(self) -> int:
        """Return the newest epoch; forget the journal if it is another process's."""
        newest = max(self._listed_epochs(), default=0)
        if newest > self._seen_epoch:
            self._seen_epoch = newest
            self._journal = None
        return self._seen_epoch

    def _refuse_stale(self, epoch: int) -> None:
        # The first look spares a request where this process itself knows of a newer one.
        if epoch < self._seen_epoch or epoch < self._look_for_epochs():
            raise stale(epoch, self._seen_epoch)

    # Cutting the journal short

    def do_compact(self, is_forced: bool = False) -> None:
        """Write a snapshot if the journal is long; remove what the snapshot before it covers."""
        journal = self._journal
        if journal is None or self.is_closing or not (journal.is_long or is_forced):
            return
        # Also if it fails: the next try comes when the journal has grown by as much again.
        journal.objects = journal.size = 0
        with explained(self.url):
            if journal.last == journal.sound or not self._write_snapshot(journal):
                return
            covered, journal.sound = journal.sound, journal.last
            if covered is None:
                return
            # Snapshots first, see the module.
            self._remove(
                [f"snapshot/{each.name}" for each in self._positions("snapshot") if each < covered]
                + [f"txn/{each.name}" for each in self._positions("txn") if each <= covered]
            )

    def _write_snapshot(self, journal: _Journal) -> bool:
        name = f"snapshot/{journal.last.name}"
        snapshot = Snapshot(journal.last, journal.records)
        with contextlib.suppress(FileExistsError):
            self._folder.create(name, encode_snapshot(snapshot, self._writer))
        try:
            written = decode_snapshot(self.url, self._folder.read([name])[name])
        except DamagedError:
            return False
        return written.records == snapshot.records

    def _remove(self, names: list[str]) -> None:
        """Remove objects, a few at a time."""
        if names and not self.is_closing:
            with explained(self.url):
                self._folder.remove(names[:REMOVE_AT_ONCE])
            self.post(lambda: self._remove(names[REMOVE_AT_ONCE:]))
