"""Tags of the current code, which name its replica and request, for log records and printed lines."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TextIO

from daskserve.common.formatting import encodable
from daskserve.common.types import split_deployment_tag
from daskserve.context import current_instance, current_replica, current_request
from daskserve.telemetry.logs.formats import json_of, place_of
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import PRINTED, Tags
from daskserve.telemetry.tracing.current import current_trace_id

#: Maximum length of a printed line in the log; longer lines are truncated.
MAX_LINE = 8192
#: Maximum number of incomplete lines; beyond it, the oldest is written although it is incomplete.
MAX_BEGUN = 1000


@lru_cache(256)
def _part(component: str, instance: str) -> Tags:
    return Tags(component=component, instance=instance)


@lru_cache(1024)
def _names(tag: str) -> tuple[str, str]:
    return split_deployment_tag(tag)


def _names_of(replica_tag: str) -> tuple[str, str, str]:
    return (*_names(replica_tag.rpartition("#")[0]), replica_tag)


def tags_of(record: logging.LogRecord, logs: ProcessLogs) -> Tags:
    """Return the tags of a record that the current code logs."""
    found = current_tags()
    if found is not None:
        return found
    name = record.name
    instance = current_instance.get()
    if name.startswith("daskserve."):
        replica = vars(record).get("replica")
        if replica:  # the record names its replica
            return Tags(*_names_of(replica), component="replica", instance=instance)
        part = "worker"
        if name.startswith("daskserve.prox"):
            part = "proxy"
        elif name.startswith("daskserve.control"):
            part = "controller"
        return _part(part, instance)
    if name.startswith(("distributed", "tornado", "asyncio")):
        return _part("worker", "")
    return logs.only_replica() or _part("worker", instance)


def current_tags() -> Tags | None:
    """Return the replica and the request that the current code runs for; None outside of replicas."""
    replica = current_replica.get()
    if replica is None:
        return None
    application, deployment = _names(replica.backend_tag)
    request = current_request.get()
    ids = ("", "", "") if request is None else (request.request_id, current_trace_id(), request.route)
    return Tags(application, deployment, replica.replica_tag, *ids, "replica", replica.instance)


class TaggedOutput(io.TextIOBase):
    """Standard output that marks the lines of replicas, and keeps them with the log.

    A line is written once it is complete, or flushed. Everything else passes through.
    """

    def __init__(self, stream: TextIO, logs: ProcessLogs, take: Callable[[str, Tags], None]) -> None:
        self.stream = stream
        self._logs = logs
        self._take = take
        #: The beginnings of lines, by replica and thread.
        self._begun: dict[tuple[str, int], str] = {}

    def write(self, text: str) -> int:
        """Write a string; lines of a replica get its name."""
        tags = current_tags()
        if tags is None:
            return self.stream.write(text)
        key = (tags.replica, threading.get_ident())
        *lines, rest = (self._begun.pop(key, "") + encodable(text)).split("\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], ""
        if rest:
            self._begun[key] = rest
        while len(self._begun) > MAX_BEGUN:
            # The thread or replica of the oldest line has most likely ended.
            oldest = next(iter(self._begun))
            self._write_line(self._begun.pop(oldest, ""), self._logs.tags_of(oldest[0]))
        for line in lines:
            self._write_line(line, tags)
        return len(text)

    def _write_line(self, line: str, tags: Tags) -> None:
        settings = self._logs.settings_of(tags)
        if settings is None:
            marked = line
        elif settings.encoding == "JSON":
            record = logging.makeLogRecord({"name": PRINTED, "levelname": "INFO", "msg": line})
            marked = json_of(record, tags, settings)
        else:
            place = place_of(tags.application, tags.deployment, tags.replica)
            marked = f"{place}: {line}"
        if settings is None or settings.to_stdout:
            self.stream.write(f"{marked}\n")
        self._take(line[:MAX_LINE], tags)

    def flush(self) -> None:
        """Flush the stream, including the incomplete line of this replica."""
        tags = current_tags()
        if tags is not None:
            begun = self._begun.pop((tags.replica, threading.get_ident()), "")
            if begun:
                self._write_line(begun, tags)
        self.stream.flush()

    def end(self, replica: str | None = None) -> None:
        """Write the incomplete lines of a replica, or of all replicas."""
        begun = [key for key in tuple(self._begun) if replica in (None, key[0])]
        for key in begun:
            if line := self._begun.pop(key, ""):
                self._write_line(line, self._logs.tags_of(key[0]))
        if begun:
            self.stream.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def mark_output(logs: ProcessLogs, take: Callable[[str, Tags], None]) -> Callable[[], None]:
    """Mark the lines that replicas print from now on; return a function that undoes this."""
    before = sys.stdout
    if before is None or isinstance(before, TaggedOutput):
        return lambda: None
    marked = sys.stdout = TaggedOutput(before, logs, take)
    logs.before_end = marked.end

    def undo() -> None:
        logs.before_end = lambda source: None
        marked.end()
        if sys.stdout is marked:  # otherwise other code has replaced it
            sys.stdout = before

    return undo
