"""A store in a folder of any file system that fsspec supports: a journal of immutable objects.

::

    <root>/<instance>/format/<n>                 the format, and which instance owns the folder
                      epoch/...                  claims, see `daskserve.cluster.store.folder_claims`
                      txn/<epoch>-<number>       one commit
                      snapshot/<epoch>-<number>  all records as of that commit
                      aside/...                  copies of objects that could not be read
                      closed/<epoch>             the process that claimed it has closed the store

These file systems have no transactions. The journal needs only what `daskserve.cluster.store.folders`
provides: an object appears complete, and is created only if its name is free. This gives:

* Durability. A commit is one object. A commit that returned is durable: synced on a disk, accepted by an
  object store.
* Fencing. An epoch belongs to the process that created its object. A commit checks for newer epochs before it
  writes *and after*, and succeeds only if there are none. So the object of a successful commit is older than
  the next epoch's, and the process that claims that epoch finds the commit when it loads. A controller that
  is replaced while it writes gets an error. Once its successor has written, the chain of positions
  (`daskserve.cluster.store.journal`) excludes the late object from the history. The fence is exact where
  creation is exclusive and listings are consistent: disks, NFS, S3, GCS, Azure. Elsewhere (SFTP, SMB), two
  processes that claim an epoch at the same moment may both succeed. Within one scheduler process the fence is
  exact everywhere.
* Unknown outcomes. A commit whose outcome is unknown (the connection broke) raises, and its number is not
  used again. The next commit builds on the one before it, so the lost commit is void even if it arrives late.

* A folder that is removed, moved or replaced is noticed. A commit checks that the epoch that this process
  knows and the head of its journal are in the folder. If they are not, changes that must be durable are
  refused, and all others are kept in memory until `FsspecStore.rewrite` writes everything as one snapshot.

Compaction writes a snapshot when the journal outgrows the records, so its cost stays proportional to the
written data. A snapshot removes only objects that the *previous* snapshot covers: if the newest one is
damaged, nothing is lost. Compaction removes snapshots before changes, and a reader lists them in the same
order, so a crash or a concurrent reader always finds a complete history.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from urllib.parse import quote, unquote

from psutil import pid_exists

from daskserve.cluster.protocols.stores import Claim
from daskserve.cluster.store.errors import (
    StoreIncompleteError,
    StoreUnavailableError,
    check_format,
    stale,
    stale_claim,
    without_password,
)
from daskserve.cluster.store.folder_claims import FolderClaims, epochs_in, named
from daskserve.cluster.store.folders import Folder, connect, translated_errors
from daskserve.cluster.store.journal import (
    FORMAT,
    START,
    DamagedError,
    Journal,
    JournalEntry,
    Position,
    Snapshot,
    decode_snapshot,
    encode_change,
    encode_snapshot,
)
from daskserve.cluster.store.problems import StoreProblems
from daskserve.cluster.store.reading import ATTEMPTS, positions_in, read_journal
from daskserve.cluster.store.thread import BlockingCalls, BlockingStore
from daskserve.common.types import InstanceName

#: The folder of the epochs whose process has closed the store.
CLOSED = "closed"
FOLDERS = ("format", "epoch", "txn", "snapshot", "aside", CLOSED)
#: Maximum number of attempts at a claim, and the longest pause before the second; later pauses are longer.
CLAIM_ATTEMPTS, CLAIM_PAUSE_S = 32, 0.02
#: Objects removed per job; commits run between the jobs.
REMOVE_AT_ONCE = 64


def folder_of(instance: InstanceName) -> str:
    """Return the name of an instance's folder: one path segment that is valid on every file system."""
    return quote(instance, safe="").replace(".", "%2E").replace("%", "=") or "="


def instance_in(folder: str) -> InstanceName:
    """Return the instance that owns a folder; the inverse of `folder_of`."""
    return "" if folder == "=" else unquote(folder.replace("=", "%"))


def user_of(folder: Folder) -> str:
    """Return the process that may still use an instance's folder; empty if there is none."""
    epochs = epochs_in(folder.names("epoch"))
    if not epochs:
        return ""
    newest = f"{max(epochs):08d}"
    if folder.has(f"{CLOSED}/{newest}"):
        return ""
    note = json.loads(folder.read([f"epoch/{newest}"])[f"epoch/{newest}"] or b"{}")
    if "pid" not in note:
        return f"a process of an earlier version that claimed epoch {max(epochs)} and may have ended since"
    if note["host"] != socket.gethostname():
        return f"process {note['pid']} on host {note['host']}, which may have ended since"
    return f"process {note['pid']} on this host" if pid_exists(note["pid"]) else ""


class FsspecStore(BlockingStore):
    """A `BlockingStore` in a folder; the module docstring states its guarantees.

    Parameters
    ----------
    calls : BlockingCalls
        Runs the methods of this store, and compacts the journal in between.
    connect : callable, optional
        Returns the instance's folder, given the URL and the folder's name. It runs in the store's thread.
    """

    def __init__(
        self,
        url: str,
        instance: InstanceName,
        calls: BlockingCalls,
        connect: Callable[[str, str], Folder] = connect,
    ) -> None:
        self.url = without_password(url)
        self.instance = instance
        self.problems = StoreProblems(self.url, instance)
        self._calls = calls
        self._connect = lambda: connect(url, folder_of(instance))
        self._writer = uuid.uuid4().hex
        self._connected: Folder | None = None
        self._claims = FolderClaims(lambda: self._folder, self._note)
        self._seen_epoch = 0
        #: The last epoch that this process has claimed.
        self._own_epoch = 0
        #: Whether the newest known epoch was in the folder at the last listing.
        self._has_epoch = True
        self._journal: Journal | None = None
        #: Whether missing changes are accepted.
        self._repairs = False

    @property
    def _folder(self) -> Folder:
        assert self._connected is not None
        return self._connected

    # Lifecycle

    def open(self) -> None:
        with translated_errors(self.url):
            self._connected = self._connect()
            self._folder.prepare(FOLDERS)
            if not self._check_format():
                with contextlib.suppress(FileExistsError):  # another process opens it at the same time
                    self._folder.create(f"format/{FORMAT:08d}", self._note())

    def close(self) -> None:
        self._journal = None
        if self._connected is not None:
            if self._own_epoch:
                with contextlib.suppress(Exception):  # the object only informs operators
                    self._connected.create(f"{CLOSED}/{self._own_epoch:08d}", self._note())
                self._own_epoch = 0
            self._connected.close()
            self._connected = None

    def _check_format(self) -> bool:
        found = [int(name) for name in self._names("format") if name.isdecimal()]
        if found:
            check_format(self.url, max(found), FORMAT)
        return bool(found)

    def _note(self, owner: str | None = None) -> bytes:
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        note = {"instance": self.instance, "writer": self._writer, **who}
        return json.dumps(note if owner is None else {**note, "owner": owner}).encode()

    # Reading

    def load(self) -> Mapping[str, bytes]:
        with translated_errors(self.url):
            self._refresh_epoch()
            return dict(self._known().records)

    def _known(self) -> Journal:
        if self._journal is not None:
            return self._journal
        journal, reader = read_journal(self.url, self._folder)
        if reader.missing and not self._repairs:
            raise StoreIncompleteError(
                f"The store {self.url} cannot be used, because changes of instance {self.instance!r} are "
                f"missing: {', '.join(reader.missing)}. If the folder is an incomplete copy, copy all of "
                "it, or restore a backup (daskserve store restore). To continue with the remaining "
                "records: daskserve store repair. Nothing was changed."
            )
        self.problems.report(reader.problems)
        self._journal = journal
        return journal

    def repair(self) -> str:
        """Open the store, and accept the readable records as complete; return what was missing."""
        self._repairs = True
        self.open()
        with translated_errors(self.url):
            missing = read_journal(self.url, self._folder)[1].missing
        if missing:
            records = self.load()
            self.rewrite(self.claim_epoch(), records)
        self._repairs = False
        return f"changes are missing: {', '.join(missing)}" if missing else ""

    # Writing

    def commit(
        self, epoch: int, records: Mapping[str, bytes | None], must_last: bool = True, may_wait: bool = False
    ) -> None:
        with translated_errors(self.url):
            self._refuse_stale(epoch)
            if epoch > self._seen_epoch:
                self._take_epoch(epoch)
            if not records:
                return
            for _ in range(ATTEMPTS):
                try:
                    journal = self._append(epoch, records, must_last, may_wait)
                except FileExistsError:
                    self._journal = None  # another process writes with this epoch; read its changes first
                    continue
                if journal.is_long:
                    self._calls.post(self.compact)
                return
        raise StoreUnavailableError(f"Another process is writing to the store {self.url}; retry later.")

    def _append(
        self, epoch: int, records: Mapping[str, bytes | None], must_last: bool, may_wait: bool
    ) -> Journal:
        journal = self._known()
        if epoch < journal.last.epoch:
            self._seen_epoch = journal.last.epoch
            raise stale(epoch, self._seen_epoch)
        lost = self._lost(journal)
        self.problems.check_place(lost, must_last=must_last)
        number = journal.numbers.get(epoch, 0) + 1
        journal.numbers[epoch] = number  # the number is used even if the write fails
        change = JournalEntry(Position(epoch, number), journal.last, records)
        if lost:
            journal.add(change, 0)
            return journal
        data = encode_change(change, self._writer)
        self._folder.create(f"txn/{change.position.name}", data, may_wait=may_wait)
        self._refuse_stale(epoch)
        self.problems.check_place(self._lost(), must_last=must_last)
        journal.add(change, len(data))
        return journal

    def _lost(self, journal: Journal | None = None) -> str:
        """Return why this is no longer the folder that this process wrote to; empty if it still is.

        Looks for the newest epoch, as of the last listing, and for the head of ``journal``.
        """
        if not self._has_epoch:
            return f"the folder of instance {self.instance!r} was removed, moved or replaced"
        if journal is None or journal.last == START:
            return ""
        if not any(self._folder.has(f"{folder}/{journal.last.name}") for folder in ("txn", "snapshot")):
            return f"change {journal.last.name} of instance {self.instance!r} is missing"
        return ""

    def rewrite(self, epoch: int, records: Mapping[str, bytes]) -> None:
        with translated_errors(self.url):
            self._folder.prepare(FOLDERS)
            if not self._check_format():
                self._folder.create(f"format/{FORMAT:08d}", self._note())
            epochs = self._claims.epochs()
            if max(epochs, default=0) > epoch:
                raise stale(epoch, max(epochs))
            if epoch not in epochs:
                self._folder.create(named(epoch), self._note())
            there = [*positions_in(self._folder, "txn"), *positions_in(self._folder, "snapshot")]
            numbers = [each.number for each in there if each.epoch == epoch]
            known = 0 if self._journal is None else self._journal.numbers.get(epoch, 0)
            journal = Journal.of(Position(epoch, 1 + max([known, *numbers])), records)
            if not self._write_snapshot(journal):
                raise StoreUnavailableError(f"The store {self.url} has lost the last write; try again.")
            self._journal, self._seen_epoch, self._has_epoch = journal, epoch, True
            self.problems.check_place(self._lost(journal), must_last=True)

    # Epochs

    def newest_epoch(self) -> int:
        with translated_errors(self.url):
            return self._refresh_epoch()

    def claim_epoch(self, after: int | None = None, owner: str = "") -> int:
        with translated_errors(self.url):
            self._check_format()
            # Epoch objects may be lost; the names of changes and snapshots also carry epochs.
            written = max(
                (
                    each.epoch
                    for folder in ("txn", "snapshot")
                    for each in map(Position.parse, self._names(folder))
                    if each is not None
                ),
                default=0,
            )
            if self._refresh_epoch() and not self._has_epoch:
                # The folder is lost. Its instance continues from memory, until the records are rewritten.
                self._seen_epoch = max(written, self._seen_epoch) + 1
                self.problems.check_place(self._lost(), must_last=False)
                return self._seen_epoch
            for attempt in range(CLAIM_ATTEMPTS):
                # Without a random pause, two processes could overtake each other forever.
                time.sleep(attempt * CLAIM_PAUSE_S * int(self._writer[:4], 16) / 0xFFFF)
                newest = self._refresh_epoch()
                if after is not None and newest != after:
                    raise stale_claim(after, newest)
                claimed = max(written, newest) + 1
                if self._take_epoch(claimed, owner) and self._refresh_epoch() == claimed:
                    if newest != self._own_epoch:
                        self._journal = None  # the previous owner may have written until now
                    self._own_epoch = claimed
                    # The newest object is enough to fence all older epochs.
                    self._claims.clear(claimed)
                    older = [each for each in epochs_in(self._names(CLOSED)) if each < claimed]
                    self._folder.remove([f"{CLOSED}/{each:08d}" for each in older])
                    return claimed
        raise StoreUnavailableError(
            f"Other processes keep claiming epochs in the store {self.url}; retry later."
        )

    def newest_claim(self, *, answers: bool = False) -> Claim:
        with translated_errors(self.url):
            names = self._claims.names()
            if answers:
                self._claims.answer(names)
            return self._claims.of(self._refresh_epoch(names))

    def query_owner(self, by: str) -> bool:
        with translated_errors(self.url):
            return self._claims.query_owner(by)

    def forget_query(self, by: str) -> None:
        with translated_errors(self.url):
            self._claims.forget(by)

    def _take_epoch(self, epoch: int, owner: str | None = None) -> bool:
        """Claim an epoch for this process; return False if another process has claimed it."""
        try:
            self._folder.create(named(epoch), self._note(owner))
        except FileExistsError:
            self._refresh_epoch()
            return False
        self._seen_epoch, self._has_epoch = epoch, True
        return True

    def _names(self, folder: str) -> list[str]:
        try:
            return self._folder.names(folder)
        except FileNotFoundError:
            return []  # the folder was removed

    def _refresh_epoch(self, names: Collection[str] | None = None) -> int:
        """Return the newest epoch; drop the journal if another process claimed it."""
        listed = epochs_in(self._claims.names() if names is None else names)
        newest = max(listed, default=0)
        self._has_epoch = newest >= self._seen_epoch
        if newest > self._seen_epoch:
            self._seen_epoch = newest
            self._journal = None
        return self._seen_epoch

    def _refuse_stale(self, epoch: int) -> None:
        # The first check saves a request when this process already knows a newer epoch.
        if epoch < self._seen_epoch or epoch < self._refresh_epoch():
            raise stale(epoch, self._seen_epoch)

    # Compaction

    def compact(self, is_forced: bool = False) -> None:
        """Write a snapshot if the journal is long, and remove objects that the previous one covers."""
        journal = self._journal
        if journal is None or not self._calls.is_open or not (journal.is_long or is_forced):
            return
        # Reset first: after a failure, the next attempt waits until the journal has grown as much again.
        journal.objects = journal.size = 0
        with translated_errors(self.url):
            if journal.last == journal.sound or not self._write_snapshot(journal):
                return
            covered, journal.sound = journal.sound, journal.last
            if covered is None:
                return
            # Snapshots before changes; see the module docstring.
            self._remove(
                [f"snapshot/{each.name}" for each in positions_in(self._folder, "snapshot") if each < covered]
                + [f"txn/{each.name}" for each in positions_in(self._folder, "txn") if each <= covered]
            )

    def _write_snapshot(self, journal: Journal) -> bool:
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
        """Remove objects in batches, so that commits can run in between."""
        if names and self._calls.is_open:
            with translated_errors(self.url):
                self._folder.remove(names[:REMOVE_AT_ONCE])
            self._calls.post(lambda: self._remove(names[REMOVE_AT_ONCE:]))
