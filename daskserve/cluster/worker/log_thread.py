"""The thread that calls the handlers of ``logging`` in a process that serves requests.

Problem: a handler runs in the thread that logs. A slow handler (a rich traceback, a full disk, a remote
collector) holds the event loop of the worker, and with it all requests, heartbeats and health checks, or the
loop or the threads of a replica. Prior art: ``QueueHandler`` and ``QueueListener``. They take the handlers
that exist when they are installed, whereas user code adds handlers at any time. ``basicConfig`` would find a
queue's handler and add none, and each logger that does not propagate, such as Dask's, would need a separate
queue handler.

Choice: loggers and handlers stay unchanged, and only the call from the logger to its handlers moves to this
thread. A handler still gets each record in order, with its exception, and with the context variables of the
code that logged it. The message is formatted early if the message or its arguments might change, are large,
or cannot be encoded.

Cost: a killed process loses the records that its handlers have not received. If the handlers are slower than
the records, the queue fills, and further records are dropped and counted.
"""

from __future__ import annotations

import atexit
import contextvars
import copy
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any, NamedTuple

from daskserve.cluster.actors.recent_log import LogSink
from daskserve.cluster.worker.tagging import tags_of
from daskserve.common.formatting import encodable, shown
from daskserve.internals.python import CallHandlers, intercept_records, stop_intercepting
from daskserve.telemetry.logs.formats import traceback_of
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import MAX_TEXT, PRINTED, Entry, Tags
from daskserve.telemetry.logs.settings import has_handlers

logger = logging.getLogger("daskserve.logging")

#: Maximum number of records in the queue; later ones are dropped.
MAX_RECORDS = 10_000
#: Maximum number of queued records that keep their exception, whose traceback keeps the locals of all frames.
#: The tracebacks of further ones are formatted at once.
MAX_TRACEBACKS = 100
#: Number of records that the handlers receive between two reports of dropped ones.
REPORT_EVERY = 1000
#: Maximum time for the handlers to receive the queued records when the process or daskserve ends.
FLUSH_S = 2.0

#: How long lines of the access log are gathered: each time the thread wakes, it takes the interpreter lock
#: from an event loop.
GATHER_S = 0.05

#: Types of arguments that cannot change before the message is formatted.
_PLAIN = frozenset({int, float, bool, type(None)})


class _QueuedRecord(NamedTuple):
    logger: logging.Logger
    record: logging.LogRecord
    context: contextvars.Context
    has_permit: bool
    tags: Tags
    kept: Entry
    #: Whether the entry is a line that user code has printed, which no handler gets.
    is_print: bool = False


class _Drain(NamedTuple):
    """An entry of the queue: lines of the access log wait, or an actor has logged its last record."""

    gone: tuple[Any, ...]


class LogThread:
    """Calls the handlers for all log records of this process in a separate thread.

    Parameters
    ----------
    logs : ProcessLogs, optional
        Writes the records, beside the handlers.
    """

    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        max_tracebacks: int = MAX_TRACEBACKS,
        recent: LogSink | None = None,
        logs: ProcessLogs | None = None,
    ) -> None:
        self._max_records = max_records
        self.logs = ProcessLogs() if logs is None else logs
        #: Keeps the last records of each replica for the status.
        self._recent = recent
        # Unlike the other queues, this one may be used by a destructor that runs within its own methods.
        self._queue: queue.SimpleQueue[_QueuedRecord | _Drain | threading.Event | None] = queue.SimpleQueue()
        #: One permit for each further record that may keep its exception. The deque's methods are atomic.
        self._permits = deque([True] * max_tracebacks)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._dropped = 0
        self._received = 0
        self._original: CallHandlers
        self._intercept: CallHandlers

    @property
    def is_open(self) -> bool:
        """Whether records pass through this thread."""
        return self._thread is not None

    def open(self) -> None:
        """Begin; idempotent."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name="daskserve-logging", daemon=True)

        def intercept(source: logging.Logger, record: logging.LogRecord) -> None:
            try:
                is_taken = self._put(source, record)
            except Exception:  # errors must not reach the code that logs
                is_taken = False
                _report_error()
            if not is_taken:
                self._original(source, record)

        self._intercept = intercept
        self._original = intercept_records(intercept)
        self._thread = thread
        self.logs.open()
        self.logs.wake = lambda *gone: self._queue.put(_Drain(gone))
        self.logs.call_handlers = self._original
        thread.start()
        atexit.register(self._end_process, thread)

    def close(self) -> None:
        """Return when the handlers have received all earlier records, after `FLUSH_S` at the latest.

        From then on, handlers are called by the code that logs, as before `open`. Idempotent.
        """
        if self._thread is None:
            return
        flushed = threading.Event()
        self._queue.put(flushed)
        if flushed.wait(FLUSH_S):
            atexit.unregister(self._end_process)
        stop_intercepting(self._intercept, self._original)
        self._thread = None
        self._queue.put(None)
        self.logs.call_handlers = None
        self.logs.close()

    def _end_process(self, thread: threading.Thread) -> None:
        if os.getpid() != self._pid:
            return  # a forked process has no such thread
        self._thread = None
        self._queue.put(None)
        thread.join(FLUSH_S)
        if thread.is_alive() and sys.stderr is not None:
            sys.stderr.write(
                f"daskserve: about {self._queue.qsize() + self._dropped} log records are lost, because the "
                f"handlers of logging did not receive them within {shown(FLUSH_S)} s.\n"
            )

    def _put(self, source: logging.Logger, record: logging.LogRecord) -> bool:
        """Queue or drop a record; return False if its handlers must be called here."""
        thread = self._thread
        # A forked process has no such thread. A handler that logs must not add to the queue.
        if thread is None or os.getpid() != self._pid or threading.get_ident() == thread.ident:
            return False
        logs = self.logs
        tags = tags_of(record, logs)
        if logs.is_below_level(record, tags):
            return True
        tags.mark(record)
        if self._queue.qsize() >= self._max_records:
            # A handler may hang. The record is still part of the status and the logs API.
            self._keep(_with_final_message(record), tags)
            self._drop()
            return True
        has_permit = False
        if record.exc_info:
            try:
                has_permit = self._permits.pop()
            except IndexError:
                record = copy.copy(record)
                traceback_of(record)
                record.exc_info = None
        record = _with_final_message(record)
        kept = self._keep(record, tags)
        self._queue.put(_QueuedRecord(source, record, contextvars.copy_context(), has_permit, tags, kept))
        return True

    def _keep(self, record: logging.LogRecord, tags: Tags) -> Entry:
        if self._recent is not None:
            self._recent.take(record, tags)
        return self.logs.ring.add(record, tags)

    def take_print(self, text: str, tags: Tags) -> None:
        """Keep a line that user code has printed, and write it to the log file if there is one."""
        record = logging.makeLogRecord({"name": PRINTED, "levelno": logging.INFO, "levelname": "INFO"})
        record.msg = text
        tags.mark(record)
        kept = self._keep(record, tags)
        if self._thread is None or os.getpid() != self._pid:
            return
        if self._queue.qsize() >= self._max_records:
            self._drop()
            return
        context = contextvars.Context()
        self._queue.put(_QueuedRecord(logger, record, context, False, tags, kept, is_print=True))

    def _drop(self) -> None:
        self._dropped += 1
        self.logs.dropped["queue"] += 1

    # ---- in the thread

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            if isinstance(entry, threading.Event):
                self._report_dropped()
                entry.set()
            elif isinstance(entry, _Drain):
                if not entry.gone:
                    time.sleep(GATHER_S)
                self._drain(entry.gone)
            else:
                self._call_handlers(entry)
            del entry  # an idle thread must not keep a traceback in memory

    def _call_handlers(self, entry: _QueuedRecord) -> None:
        try:
            entry.context.run(self._handle, entry)
        except Exception:
            _report_error()
        if entry.has_permit:
            self._permits.append(True)
        self._received += 1
        if self._received % REPORT_EVERY == 0 or self._queue.empty():
            self._report_dropped()

    def _handle(self, entry: _QueuedRecord) -> None:
        source, record = entry.logger, entry.record
        if record.exc_info:
            self.logs.ring.add_traceback(entry.kept, traceback_of(record)[-MAX_TEXT:])
        is_written = self.logs.write(
            record, entry.tags, has_handlers=has_handlers(source), is_print=entry.is_print
        )
        if not is_written and not entry.is_print:
            self._original(source, record)

    def _drain(self, gone: tuple[Any, ...]) -> None:
        try:
            self.logs.drain(gone)
        except Exception:
            _report_error()

    def _report_dropped(self) -> None:
        count, self._dropped = self._dropped, 0
        if count:
            logger.warning("Dropped %d log records, because the logging handlers are too slow", count)


def _is_final(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is str and (value.isascii() or encodable(value) == value))


def _report_error() -> None:
    # Handlers report their own errors. This error comes from a filter, or from a handler that does not report
    # the error itself.
    if logging.raiseExceptions and sys.stderr is not None:
        traceback.print_exc()


def _with_final_message(record: logging.LogRecord) -> logging.LogRecord:
    """Return a record whose message can be encoded, and does not refer to changing or large objects."""
    args = record.args or ()
    if type(args) is tuple and _is_final(record.msg) and all(map(_is_final, args)):
        return record
    try:
        message = encodable(record.getMessage())
    except Exception:  # the handlers report the error
        return record
    record = copy.copy(record)
    record.msg, record.args = message, None
    return record
