"""The last log records of a process, in memory, and how they are searched."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daskserve.common.clock import time_of_day
from daskserve.telemetry.logs.records import Access, AccessLine, Entry, Plain, Tags

#: Maximum number of records that a process keeps, and approximate maximum size of their strings.
MAX_ENTRIES, MAX_BYTES = 20_000, 8 << 20
#: The size of an entry without its text.
_OVERHEAD = 400
#: Number of lines of the access log per entry, so small that the ring has room for several entries of the
#: longest lines.
_LINES = 64

#: The fields of a record in which a text is searched.
_SEARCHED = ("message", "exception", "request_id", "trace_id")


@dataclass(frozen=True, slots=True)
class Query:
    """Selects log records.

    Attributes
    ----------
    after : dict
        The number of the last known record of each source; all records of other sources are selected.
    since : float or None
        Select only records created since this time, in seconds since the epoch.
    level : str
        The lowest level.
    grep : str
        A string that the message, the traceback, or the id of the request or of its trace contains.
    limit : int
        Maximum number of records; the newest are selected, or the oldest if ``after`` is given.
    instance : str
        Select only records of this instance and records that belong to no instance.
    """

    application: str | None = None
    deployment: str | None = None
    replica: str | None = None
    since: float | None = None
    level: str | None = None
    grep: str | None = None
    limit: int = 1000
    instance: str | None = None

    def plain(self) -> Mapping[str, Any]:
        """Return plain values."""
        return asdict(self)

    def select(self, entries: Iterable[Plain], after: int | None = None) -> list[Plain]:
        """Return the matching records in the order in which they were created.

        Parameters
        ----------
        after : int, optional
            Only records with higher numbers, the oldest first if there are more than ``limit``. None: the
            newest.
        """
        levelno = 0 if self.level is None else logging.getLevelNamesMapping().get(self.level.upper(), 0)
        found: deque[Plain] = deque(maxlen=self.limit)
        for each in entries:
            if after is not None:
                if each["number"] <= after:
                    continue
                if len(found) == self.limit:
                    break
            if self._fits(each, levelno):
                found.append(each)
        return list(found)

    def _fits(self, entry: Plain, levelno: int) -> bool:
        if self.since is not None and entry["time"] < self.since:
            return False
        if entry["levelno"] < levelno:
            return False
        if self.instance is not None and entry["instance"] not in ("", self.instance):
            return False
        for name, wanted in (("application", self.application), ("deployment", self.deployment)):
            if wanted is not None and entry[name] != wanted:
                return False
        replica = entry["replica"]
        if self.replica is not None and self.replica not in (replica, replica.rpartition("#")[2]):
            return False
        return self.grep is None or any(self.grep in entry[name] for name in _SEARCHED)


class _AccessEntry:
    """Lines of the access log as bytes.

    Bytes take a quarter of the memory of objects. Objects would also evict useful data from the processor's
    caches in a busy process, and each full garbage collection would visit them.
    """

    __slots__ = ("count", "data", "number")

    def __init__(self, lines: Sequence[AccessLine]) -> None:
        #: The number of the first line.
        self.number = 0
        self.count = len(lines)
        self.data = pickle.dumps(lines, pickle.HIGHEST_PROTOCOL)

    @property
    def size(self) -> int:
        return len(self.data)

    def rows(self) -> Iterator[Plain]:
        for number, line in enumerate(pickle.loads(self.data), self.number):
            yield {**Access(*line).plain(), "number": number}


class Ring:
    """The last records of this process. Any thread may add some."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._entries: deque[Entry | _AccessEntry] = deque()
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._count = self._bytes = 0
        # Reentrant, because a destructor may log within `_append`. Numbers are assigned under the lock, so
        # that records appear in the order of their numbers.
        self._lock = threading.RLock()
        #: The number of the next record, higher than those of an earlier process at this address.
        self._number = int(time_of_day() * 1e6)

    def add(self, record: logging.LogRecord, tags: Tags) -> Entry:
        """Keep a record."""
        entry = Entry(record, tags)
        self._append(entry)
        return entry

    def add_access(self, lines: Sequence[AccessLine]) -> None:
        """Keep lines of the access log."""
        for start in range(0, len(lines), _LINES):
            self._append(_AccessEntry(lines[start : start + _LINES]))

    def _append(self, entry: Entry | _AccessEntry) -> None:
        with self._lock:
            entry.number = self._number
            self._number += entry.count
            self._count += entry.count
            self._entries.append(entry)
            self._bytes += entry.size + _OVERHEAD
            self._trim()

    def add_traceback(self, entry: Entry, text: str) -> None:
        """Format the traceback of a record that was kept without its text, and keep it."""
        with self._lock:
            more = len(text) - len(entry.exception)
            entry.exception = text
            entry.size += more
            if self._entries and entry.number >= self._entries[0].number:
                self._bytes += more
                self._trim()

    def _trim(self) -> None:
        entries = self._entries
        while entries and (
            self._bytes > self._max_bytes or self._count - entries[0].count >= self._max_entries
        ):
            oldest = entries.popleft()
            self._count -= oldest.count
            self._bytes -= oldest.size + _OVERHEAD

    def rows(self, after: int | None = None) -> Iterator[Plain]:
        """Yield the records as plain values, oldest first."""
        with self._lock:
            entries = tuple(self._entries)
        if after is not None:
            known = after + 1
            new = itertools.takewhile(lambda each: each.number + each.count > known, reversed(entries))
            entries = tuple(new)[::-1]
        for row in itertools.chain.from_iterable(entry.rows() for entry in entries):
            if after is None or row["number"] > after:
                yield row

    def __len__(self) -> int:
        return self._count
