"""The last log lines of replicas, for the status of failed ones: bounded memory, little work for each line.

A worker keeps the lines of its replicas in memory. A child process writes its lines to an unnamed file, which
the parent can read even after the child was killed.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from daskserve.common.clock import time_of_day
from daskserve.common.formatting import encodable
from daskserve.common.types import ReplicaTag
from daskserve.telemetry.logs.ended import ProcessFile
from daskserve.telemetry.logs.formats import traceback_of
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import ACCESS, MAX_TEXT, Access, AccessLine, Entry, Plain, Tags
from daskserve.telemetry.logs.ring import Query

#: Number of lines that are kept for each replica, and the length of each.
LINES, LENGTH = 20, 300
#: Number of replicas of which a process keeps lines.
REPLICAS = 200
#: Size at which a child's file is truncated to its last part, and the size of that part.
FILE_BYTES, KEPT_BYTES = 1 << 20, 256 << 10
#: Number of access-log lines in one line of the file.
ACCESS_LINES = 32
#: Maximum size of the records in one answer of a process.
ANSWER_BYTES = 4 << 20

#: The key of the fields of lines of the access log.
_ACCESS = "access lines"

#: The fields of a record: time, level, logger, message, arguments, and the class of its exception.
_Entry: TypeAlias = tuple[float, str, str, Any, Any, str]


class LogSink(Protocol):
    """Takes log records in the thread that logs them; their arguments no longer change."""

    def take(self, record: logging.LogRecord, tags: Tags) -> None: ...


class RecentLog(LogSink):
    """The last lines of each replica in this process."""

    def __init__(self) -> None:
        self._lines: OrderedDict[ReplicaTag, deque[_Entry]] = OrderedDict()

    def take(self, record: logging.LogRecord, tags: Tags) -> None:
        """Keep a record of a replica."""
        if not tags.replica:
            return
        lines = self._lines.get(tags.replica)
        if lines is None:
            lines = self._lines[tags.replica] = deque(maxlen=LINES)
            while len(self._lines) > REPLICAS:
                self._lines.popitem(last=False)
        lines.append(_entry(record))

    def of(self, name: str) -> tuple[str, ...]:
        """Return the last lines of a replica, given the name of its actor."""
        lines = self._lines.get(name.partition("/replica/")[2], ())
        return tuple(map(_line, tuple(lines)))

    def forget(self, name: str) -> None:
        """Drop the lines of a replica that has stopped."""
        self._lines.pop(name.partition("/replica/")[2], None)


class LogFile(LogSink):
    """A child's own records, as lines of JSON in a file that its parent has opened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = 0
        self._number = int(time_of_day() * 1e6)
        # Reentrant: a destructor that runs during `take` may log.
        self._lock = threading.RLock()

    def take(self, record: logging.LogRecord, tags: Tags) -> None:
        """Write a record as a line."""
        traceback_of(record)
        self._write(Entry(record, tags).plain())

    def take_access(self, lines: Sequence[AccessLine]) -> None:
        """Write lines of the access log as fields, which takes a fifth of the time of log records."""
        for start in range(0, len(lines), ACCESS_LINES):
            some = lines[start : start + ACCESS_LINES]
            fields = [
                (at, method, target.decode("latin-1"), query.decode("latin-1"), *others)
                for at, method, target, query, *others in some
            ]
            self._write({_ACCESS: fields}, len(some))

    def _write(self, plain: Plain, count: int = 1) -> None:
        # A full disk must not fail the user's call of a logger.
        with self._lock, suppress(OSError):
            number, self._number = self._number, self._number + count
            data = f"{json.dumps({**plain, 'number': number})}\n".encode(errors="replace")
            if self._size + len(data) > FILE_BYTES:
                kept = os.pread(self._descriptor, KEPT_BYTES, max(0, self._size - KEPT_BYTES))
                os.pwrite(self._descriptor, kept, 0)
                os.ftruncate(self._descriptor, len(kept))
                self._size = len(kept)
            self._size += os.pwrite(self._descriptor, data, self._size)


def open_file() -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("replica-log")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_file(descriptor: int) -> tuple[str, ...]:
    """Return the last lines of a child's file."""
    found = read_rows(descriptor, LINES * MAX_TEXT)
    return tuple(map(_line_of, [each for each in found if each["logger"] != ACCESS][-LINES:]))


def read_rows(descriptor: int, max_bytes: int = FILE_BYTES, after: int = 0) -> list[Plain]:
    """Return the last records of a child's file whose numbers are higher than ``after``."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - max_bytes)
    found: list[Plain] = []
    for line in reversed(os.pread(descriptor, max_bytes, start).split(b"\n")):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a partial line at the beginning or the end
        for each in _rows_of(row):
            if each["number"] <= after:
                break
            # While the file is being truncated, some records are in it twice.
            if not found or each["number"] < found[-1]["number"]:
                found.append(each)
        if row["number"] <= after:
            break
    found.reverse()
    return found


def _rows_of(row: Plain) -> Iterator[Plain]:
    """Yield the records of a line of the file, the last one first."""
    if _ACCESS not in row:
        yield row
        return
    for place, (at, method, target, query, *others) in reversed([*enumerate(row[_ACCESS])]):
        access = Access(at, method, target.encode("latin-1"), query.encode("latin-1"), *others)
        yield {**access.plain(), "number": row["number"] + place}


def answer_of(
    worker: str,
    logs: ProcessLogs,
    files: Sequence[ProcessFile],
    query: Query,
    after: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Return the records of this process and of its child processes' files that match a query.

    The caller keeps the files open.
    """
    sources: list[tuple[str, Sequence[Plain], int]] = []
    known = after or {}
    rows: Sequence[Plain] = list(logs.ring.rows(known.get(worker)))
    sources.append((worker, rows, rows[-1]["number"] if rows else known.get(worker, 0)))
    for name, _, descriptor in files:
        rows = read_rows(descriptor, after=known.get(name, 0))
        sources.append((name, rows, rows[-1]["number"] if rows else known.get(name, 0)))
    found, left = [], ANSWER_BYTES
    for source, rows, last in sources:
        chosen = query.select(rows, None if after is None else known.get(source, 0))
        if after is not None and len(chosen) == query.limit:
            last = chosen[-1]["number"]
        if after is None:
            chosen.reverse()  # the newest are kept
        kept: list[Plain] = []
        for each in chosen:
            left -= len(each["message"]) + len(each["exception"]) + 300
            if left < 0:
                if after is not None:
                    last = kept[-1]["number"] if kept else known.get(source, 0)
                break
            kept.append(each)
        if after is None:
            kept.reverse()
        found.append({"source": source, "rows": kept, "last": last})
    return {"sources": found, "dropped": logs.losses(), "problems": logs.problems()}


def _entry(record: logging.LogRecord) -> _Entry:
    kind = record.exc_info[0] if record.exc_info else None
    return (
        record.created,
        record.levelname,
        record.name,
        record.msg,
        record.args,
        "" if kind is None else kind.__name__,
    )


def _line_of(plain: Plain) -> str:
    # The last line of a traceback begins with the class.
    kind = plain["exception"].strip().rpartition("\n")[2].partition(":")[0].rpartition(".")[2]
    return _line((plain["time"], plain["level"], plain["logger"], plain["message"], None, kind))


def _line(entry: _Entry) -> str:
    created, level, name, message, args, kind = entry
    try:
        text = str(message) % args if args else str(message)
    except Exception:  # the arguments do not fit the message; the handlers report it
        text = str(message)
    clock = f"{datetime.fromtimestamp(created):%H:%M:%S}"
    text = " ".join(text.split("\n"))
    return encodable(f"{clock} {level} {name}: {text}{f' ({kind})' if kind else ''}"[:LENGTH])
