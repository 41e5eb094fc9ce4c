"""The logs of one process: the settings and destinations of each replica, proxy and controller.

The thread of `daskserve.cluster.worker.log_thread` writes; everything else only adds records and settings.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from daskserve.common.clock import stopwatch, time_of_day
from daskserve.telemetry.logs.access import AccessLines, Format
from daskserve.telemetry.logs.ended import EndedFiles
from daskserve.telemetry.logs.formats import access_json, access_text, as_record, json_of, text_of
from daskserve.telemetry.logs.old_files import delete_old
from daskserve.telemetry.logs.records import ACCESS, Access, AccessLine, Tags
from daskserve.telemetry.logs.ring import Ring
from daskserve.telemetry.logs.settings import LOGGERS, LogSettings, merged
from daskserve.telemetry.logs.sinks import FileSink, Sink, StreamSink
from daskserve.telemetry.table import MetricSample

#: The level of daskserve's own loggers in a process where no instance has settings.
DEFAULT_LEVEL = logging.INFO
#: Minimum time between two searches for files of actors that ended long ago.
DELETE_EVERY_S = 3600.0

Layer: TypeAlias = Mapping[str, Any] | None


#: A file and the settings with which it is opened; None for standard output.
_Target: TypeAlias = tuple[Path, LogSettings] | None

#: The settings of an application that has an access log although its instance has no settings.
_DEFAULTS = LogSettings()


@dataclass(frozen=True, slots=True)
class _Source:
    tags: Tags
    settings: LogSettings | None


class ProcessLogs:
    """The settings, files and last records of one process.

    Parameters
    ----------
    default_level : int or None
        The level of daskserve's own loggers while no instance has settings. None: it stays as it is.

    Attributes
    ----------
    wake : callable
        Requests a call of `drain` soon, in the thread that writes, with its arguments as ``gone``.
    access : callable
        Takes a line of the access log, in about two microseconds.
    call_handlers : callable or None
        ``call_handlers(logger, record)`` passes a line of the access log to the handlers of its logger. If
        there are handlers, the line does not go to standard output.
    before_end : callable
        Called with the name of an actor that ends, while its settings are known.
    dropped : dict
        How many records were lost, by the reason.
    ended : EndedFiles
        The logs of child processes that have ended.
    """

    def __init__(
        self,
        stdout: Sink | None = None,
        default_level: int | None = DEFAULT_LEVEL,
    ) -> None:
        self.ring = Ring()
        self.ended = EndedFiles()
        self.wake: Callable[..., object] = lambda *gone: self.drain(gone=gone)
        self.call_handlers: Callable[[logging.Logger, logging.LogRecord], None] | None = None
        self.before_end: Callable[[str], object] = lambda source: None
        self.dropped: dict[str, int] = defaultdict(int)
        self.keep_access: Callable[[Sequence[AccessLine]], object] = self.ring.add_access
        self._default_level = default_level
        self._stdout = stdout or StreamSink()
        self._files: dict[Path, FileSink] = {}
        #: The known replicas by tag, and the proxies and the controller by the name of the actor.
        self._sources: dict[str, _Source] = {}
        self._lines: AccessLines[_Target] = AccessLines(
            self._place_of,
            self._has_access_handlers,
            lambda lines: self.keep_access(lines),  # a child process replaces `keep_access`
            self._wake,
        )
        self.access = self._lines.add
        #: Held while `_sources` is replaced, by the loop or by the thread that writes.
        self._changing = threading.Lock()
        self._is_awake = False
        #: Whether settings have changed since the files were opened.
        self._has_changed = False
        self._levels: dict[str, int] = {}
        #: When to look next for files to delete.
        self._delete_at = stopwatch()

    # ---- settings

    def configure(self, source: str, tags: Tags, *layers: Layer) -> LogSettings | None:
        """Set how the records of a replica, a proxy or a controller are logged; return the settings."""
        found = merged(*layers)
        with self._changing:
            self._sources = {**self._sources, source: _Source(tags, found)}
        self._set_levels()
        if self._files:
            self._has_changed = True
            self._wake()
        return found

    def forget(self, source: str) -> None:
        """Drop the settings of an actor that has ended, once its last records are written; idempotent."""
        known = self._sources.get(source)
        if known is not None:
            self.before_end(source)
            # Handled after the actor's records, even if the thread was woken before them.
            self.wake(known)

    def _settle(self, gone: Sequence[_Source]) -> None:
        """Drop the settings of actors that have ended, and adapt the open files to those of the others."""
        self._has_changed = False
        if gone:
            with self._changing:
                # Another actor of the same name may have started in the meantime.
                self._sources = {
                    name: each
                    for name, each in self._sources.items()
                    if not any(each is other for other in gone)
                }
            self._set_levels()
        used: dict[Path, LogSettings] = {}
        for each in self._sources.values():
            path = _path(each.settings, each.tags)
            if path is not None and each.settings is not None:
                used[path] = each.settings
        for path, sink in tuple(self._files.items()):
            if path in used:
                sink.max_bytes, sink.max_files = used[path].max_file_bytes, used[path].max_files
                continue
            del self._files[path]
            if sink.lost:
                self.dropped["file"] += sink.lost
            sink.close()

    def open(self) -> None:
        """Set the level of daskserve's own loggers to `DEFAULT_LEVEL`."""
        self._set_levels()

    def close(self) -> None:
        """Restore the levels of the loggers, and close the files."""
        for name, level in self._levels.items():
            logger = logging.getLogger(name)
            if logger.level == level:
                logger.setLevel(logging.NOTSET)
        self._levels = {}
        for sink in self._files.values():
            sink.close()
        self.ended.close()

    def _set_levels(self) -> None:
        levels = [each.settings.level for each in self._sources.values() if each.settings is not None]
        level = min(levels, default=self._default_level)
        if level is None:
            return
        for name in LOGGERS:
            logger = logging.getLogger(name)
            # Keep a level that an operator or user code has set.
            if logger.level in (logging.NOTSET, self._levels.get(name)):
                logger.setLevel(level)
                self._levels[name] = level

    # ---- called by code that logs

    def only_replica(self) -> Tags | None:
        """Return the tags for threads of user code: those of the replica, if the process has only one."""
        found = None
        for each in self._sources.values():
            if each.tags.replica:
                if found is not None:
                    return None
                found = each.tags
        return found

    def is_below_level(self, record: logging.LogRecord, tags: Tags) -> bool:
        """Return whether a record of daskserve's loggers is below the level of its replica or instance."""
        settings = self.settings_of(tags)
        return settings is not None and record.levelno < settings.level and record.name.startswith(LOGGERS)

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self.wake()

    def tags_of(self, replica: str) -> Tags:
        """Return the tags of a replica's records outside requests; fewer tags once it has ended."""
        source = self._sources.get(replica)
        return Tags(replica=replica, component="replica") if source is None else source.tags

    # ---- in the thread that writes

    def write(
        self, record: logging.LogRecord, tags: Tags, *, has_handlers: bool, is_print: bool = False
    ) -> bool:
        """Write a record; return whether it went to standard output, so that no other handler is needed."""
        settings = self.settings_of(tags)
        if settings is None:
            return False
        to_stdout = settings.to_stdout and not has_handlers and not is_print
        path = _path(settings, tags)
        if not to_stdout and path is None:
            return False
        line = (json_of if settings.encoding == "JSON" else text_of)(record, tags, settings)
        if path is not None:
            self._file(path, settings).write([line])
        if to_stdout:
            self._stdout.write([line])
        return to_stdout

    def drain(self, gone: Sequence[_Source] = ()) -> None:
        """Write the waiting lines of the access log, and drop the settings of actors that have ended."""
        self._is_awake = False
        ready, for_handlers = self._lines.take()
        for target, texts in ready.items():
            (self._stdout if target is None else self._file(*target)).write(texts)
        for line in for_handlers:
            assert self.call_handlers is not None
            try:
                self.call_handlers(logging.getLogger(ACCESS), as_record(Access(*line)))
            except Exception:  # raised by a filter, or by a handler that does not report its own errors
                self.dropped["handler"] += 1
        if gone or self._has_changed:
            self._settle(gone)

    def _place_of(self, name: str) -> tuple[Format, Sequence[_Target]]:
        """Return the format and the destination of the lines of a replica or a proxy."""
        source = self._sources.get(name)
        if source is None:
            return access_text, ()
        # An application may have an access log on an instance that has no settings.
        settings = source.settings or _DEFAULTS
        path = _path(settings, source.tags)
        targets: list[_Target] = [] if path is None else [(path, settings)]
        if settings.to_stdout and not self._has_access_handlers():
            targets.append(None)
        return access_json if settings.encoding == "JSON" else access_text, targets

    def _has_access_handlers(self) -> bool:
        return self.call_handlers is not None and bool(logging.getLogger(ACCESS).handlers)

    def settings_of(self, tags: Tags) -> LogSettings | None:
        """Return the settings that apply to a record; None if there are none."""
        source = self._sources.get(tags.replica) if tags.replica else None
        if source is not None:
            return source.settings
        # Records of the worker, or of a replica that has ended, get the settings of the proxies or the
        # controller in this process; records without an instance get the settings of any instance.
        first = "proxy" if tags.replica else tags.component
        for component in dict.fromkeys((first, "proxy", "controller")):
            for each in self._sources.values():
                is_of = tags.instance in ("", each.tags.instance)
                if is_of and each.settings is not None and each.tags.component == component:
                    return each.settings
        return None

    def _file(self, path: Path, settings: LogSettings) -> FileSink:
        sink = self._files.get(path)
        if sink is None:
            sink = FileSink(path, settings.max_file_bytes, settings.max_files)
            self._files[path] = sink
            self._delete_old(path.parent, settings.ended_files_days)
        return sink

    def _delete_old(self, folder: Path, days: float | None) -> None:
        """Delete the files of actors that ended long ago; called rarely, because a folder may have thousands
        of files."""
        if days is None or stopwatch() < self._delete_at:
            return
        self._delete_at = stopwatch() + DELETE_EVERY_S
        delete_old(folder, days, time_of_day())

    # ---- for metrics and the status

    def losses(self) -> dict[str, int]:
        """Return how many records were lost, by the reason."""
        found = dict(self.dropped)
        for reason, lost in (
            ("access", self._lines.dropped),
            ("stdout", self._stdout.lost),
            ("file", sum(each.lost for each in tuple(self._files.values()))),
        ):
            if lost:
                found[reason] = found.get(reason, 0) + lost
        return found

    def file_of(self, source: str) -> str | None:
        """Return the file for the records of a proxy or a controller; None if there is none."""
        known = self._sources.get(source)
        return None if known is None else file_of(known.settings, known.tags)

    def problems(self) -> list[str]:
        """Return why files cannot be written now."""
        return [f"{each.path}: {each.problem}" for each in tuple(self._files.values()) if each.problem]

    def samples(self) -> Iterable[MetricSample]:
        """Return the metrics; see `daskserve.telemetry.table.Source`."""
        return [("log_records_dropped", (reason,), count) for reason, count in self.losses().items()]


#: The logs of the process that the current code belongs to; None outside of actors.
process_logs: ContextVar[ProcessLogs | None] = ContextVar("daskserve_process_logs", default=None)


def file_of(settings: LogSettings | None, tags: Tags) -> str | None:
    """Return the path of an actor's log file, which may not exist yet; None if no files are written."""
    path = _path(settings, tags)
    return None if path is None else str(path)


_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def _path(settings: LogSettings | None, tags: Tags) -> Path | None:
    if settings is None or settings.folder is None:
        return None
    owner = tags.deployment if tags.replica else tags.instance
    return _path_in(settings.folder, tags.component, tags.application, owner, tags.replica, os.getpid())


@lru_cache(1024)
def _path_in(folder: str, component: str, application: str, owner: str, replica: str, process: int) -> Path:
    """Return a cached path, because creating a path takes longer than formatting a line."""
    parts: tuple[str, ...]
    if replica:
        parts = ("replica", application, owner, replica.rpartition("#")[2])
    else:
        # A process may have several instances, a host several workers, and several hosts may share a folder.
        parts = (*filter(None, (component, owner)), socket.gethostname(), str(process))
    *names, last = (_UNSAFE.sub("-", each) for each in parts)
    # The last part makes the name unique.
    return Path(folder).expanduser() / f"{'_'.join(names)[:160]}_{last[:60]}.log"
