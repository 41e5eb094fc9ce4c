"""Finds the files of a project that have changed. `Patterns` selects the files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import TypeAlias

from daskserve.common.clock import stopwatch

#: Watched files, and ignored ones: hidden files, bytecode, and temporary files of editors.
INCLUDES = ("*.py",)
EXCLUDES = (".*", "*.py[cod]", "~*", "*~", "__pycache__", "node_modules")
#: The file that marks the folder of a virtual environment.
_ENVIRONMENT = "pyvenv.cfg"
#: Pause between two snapshots: a number of seconds, or a multiple of the duration of a snapshot if that is
#: longer.
LOOK_S, LOOK_FACTOR = 0.1, 10
#: A change is complete when no file has changed for this long, because editors and version control save
#: several files in turn.
SETTLED_S, UNSETTLED_S = 0.05, 1.0

#: The time, size and identity of each file.
Snapshot: TypeAlias = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Patterns:
    """Which files of some folders are watched.

    Attributes
    ----------
    includes, excludes
        Patterns of names, or of paths relative to a folder. A folder's pattern excludes its whole content.
    configuration
        Path of a file that is watched as well, and that no deployment reads; empty if there is none.
    """

    folders: tuple[str, ...]
    includes: tuple[str, ...] = INCLUDES
    excludes: tuple[str, ...] = EXCLUDES
    configuration: str = ""

    @classmethod
    def of(
        cls,
        folders: Sequence[str],
        includes: Sequence[str] = (),
        excludes: Sequence[str] = (),
        configuration: str = "",
    ) -> Patterns:
        """Return the defaults plus these patterns; an included pattern is no longer excluded."""
        return cls(
            tuple(dict.fromkeys(os.path.abspath(each) for each in folders)),
            (*INCLUDES, *includes),
            (*(each for each in EXCLUDES if each not in includes), *excludes),
            configuration and os.path.abspath(configuration),
        )

    def snapshot(self) -> Snapshot:
        """Return the state of all files."""
        found: dict[str, tuple[int, int, int]] = {}
        paths = [entry.path for root in self.folders for entry in self._files(root, root)]
        for path in (*paths, self.configuration) if self.configuration else paths:
            with suppress(OSError):  # the file was removed
                facts = os.stat(path)
                found[path] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        return found

    def other_files(self) -> list[str]:
        """Return the watched files that are neither modules nor the configuration, sorted."""
        names = self.snapshot().keys() - {self.configuration}
        return sorted(name for name in names if not name.endswith(".py"))

    def _files(self, root: str, folder: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                within = list(entries)
        except OSError:
            return
        for entry in within:
            path = os.path.relpath(entry.path, root)
            if _matches(entry.name, path, self.excludes):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not os.path.exists(os.path.join(entry.path, _ENVIRONMENT)):
                    yield from self._files(root, entry.path)
            elif _matches(entry.name, path, self.includes):
                yield entry


def _matches(name: str, path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, each) or fnmatch(path, each.removesuffix("/")) for each in patterns)


def changed_files(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the files that differ between two snapshots, sorted."""
    return sorted({name for name in before.keys() | after.keys() if before.get(name) != after.get(name)})


class FileWatch:
    """Waits for changes of a project's files.

    Between two checks it sleeps, or waits for a notification if the package watchfiles is installed.
    """

    def __init__(
        self, patterns: Patterns, ended: threading.Event, clock: Callable[[], float] = stopwatch
    ) -> None:
        self._patterns = patterns
        self._ended = ended
        self._clock = clock
        self._seen = patterns.snapshot()
        self._notifications = _notifications(patterns.folders, patterns.configuration, ended)

    def wait(self) -> list[str]:
        """Return the files that have changed since the last call; an empty list once the watch has ended."""
        while not self._ended.is_set():
            began = self._clock()
            changed = self._changed()
            if changed:
                return changed
            if not self._is_notified():
                self._ended.wait(max(LOOK_S, LOOK_FACTOR * (self._clock() - began)))
        return []

    def _is_notified(self) -> bool:
        """Wait for a notification, or for a short time; return False if notifications are not available."""
        if self._notifications is None:
            return False
        try:
            next(self._notifications)
        except (StopIteration, OSError, RuntimeError):
            # The system has run out of watches, or a folder was removed: continue without notifications.
            self._notifications = None
        return self._notifications is not None

    def _changed(self) -> list[str]:
        """Return the files that have changed, once they have settled."""
        before, seen = self._seen, self._patterns.snapshot()
        if seen == before:
            return []
        until = self._clock() + UNSETTLED_S
        while not self._ended.wait(SETTLED_S) and self._clock() < until:
            seen, last = self._patterns.snapshot(), seen
            if seen == last:
                break
        self._seen = seen
        return changed_files(before, seen)


def _notifications(
    folders: Sequence[str], configuration: str, ended: threading.Event
) -> Iterator[object] | None:
    """Return an iterator that advances when something changes in the folders, and at regular intervals."""
    if find_spec("watchfiles") is None:
        return None
    from watchfiles import watch

    found: Iterator[object] = watch(
        *folders,
        *([os.path.dirname(configuration)] if configuration else []),
        watch_filter=None,
        stop_event=ended,
        debounce=50,
        rust_timeout=200,
        yield_on_timeout=True,
    )
    return found
