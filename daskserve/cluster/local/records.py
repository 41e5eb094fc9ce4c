"""Log records of the simulated workers; each worker has the records of its actors.

The handlers of ``logging`` run in the code that logs, as usual, so that tests can read records at once.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet, ref

from daskserve.cluster.worker.tagging import tags_of
from daskserve.internals.python import CallHandlers, intercept_records, stop_intercepting
from daskserve.telemetry.logs.process import ProcessLogs, process_logs
from daskserve.telemetry.logs.settings import has_handlers


class LocalRecords:
    """Collects the log records of the actors of local clusters."""

    def __init__(self) -> None:
        self._logs: WeakSet[ProcessLogs] = WeakSet()
        self._original: CallHandlers | None = None

        # A plain function, because it replaces a method.
        def intercept(source: logging.Logger, record: logging.LogRecord) -> None:
            self._take(source, record)

        self._intercept: CallHandlers = intercept

    def open(self) -> None:
        """Begin to collect; idempotent."""
        if self._original is None:
            self._original = intercept_records(self._intercept)

    def close(self) -> None:
        """Stop collecting, and drop all records; idempotent."""
        if self._original is not None:
            stop_intercepting(self._intercept, self._original)
        for each in self._logs:
            each.close()
        self._logs.clear()

    def logs(self) -> ProcessLogs:
        """Return the logs of a new worker."""
        found = ProcessLogs(default_level=None)
        known = ref(found)

        def drain(*gone: Any) -> None:
            if (logs := known()) is not None:
                logs.call_handlers = self._original
                logs.drain(gone)

        found.wake = drain
        self._logs.add(found)
        return found

    def _take(self, source: logging.Logger, record: logging.LogRecord) -> None:
        assert self._original is not None
        logs = process_logs.get()
        if logs is None or logs not in self._logs:  # records of the program or of another local cluster
            self._original(source, record)
            return
        tags = tags_of(record, logs)
        if logs.is_below_level(record, tags):
            return
        tags.mark(record)
        logs.ring.add(record, tags)
        if not logs.write(record, tags, has_handlers=has_handlers(source)):
            self._original(source, record)
