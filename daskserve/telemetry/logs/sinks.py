"""Where lines are written: standard output, and files with rotation.

A sink is called in the log thread only. A failing sink counts the lines that it loses, and tries again later:
a full disk must neither end the thread nor fill the queue of records.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from daskserve.common.clock import stopwatch
from daskserve.telemetry.logs.old_files import hold

#: Time after which a sink that failed is tried again.
RETRY_S = 1.0


class Sink(Protocol):
    """Takes lines, and counts those that it loses."""

    lost: int

    def write(self, lines: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class StreamSink:
    """Standard output, or another stream."""

    def __init__(self, stream: Callable[[], TextIO | None] = lambda: sys.__stdout__) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, lines: Sequence[str]) -> None:
        """Write lines at once, so that lines of other processes do not get in between."""
        stream = self._stream()
        try:
            if stream is None:
                raise OSError("there is no standard output")
            encoding = getattr(stream, "encoding", None) or "utf-8"
            text = "\n".join((*lines, ""))
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (OSError, ValueError):  # the stream is full or closed, or its reader has ended
            self.lost += len(lines)

    def close(self) -> None:
        """Do nothing: the stream belongs to the process."""


class FileSink:
    """A file that is rotated when it is large; old files get the suffixes ``.1``, ``.2`` and so on.

    Parameters
    ----------
    max_bytes : int
        Size at which it is rotated.
    max_files : int
        How many old files are kept.
    """

    def __init__(
        self, path: Path, max_bytes: int, max_files: int, now: Callable[[], float] = stopwatch
    ) -> None:
        self.path = path
        self.lost = 0
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._now = now
        self._file: BinaryIO | None = None
        self._size = 0
        self._failed_at: float | None = None
        #: Why the last attempt failed.
        self.problem = ""

    def write(self, lines: Sequence[str]) -> None:
        """Append lines."""
        if self._failed_at is not None and self._now() - self._failed_at < RETRY_S:
            self.lost += len(lines)
            return
        data = "\n".join((*lines, "")).encode("utf-8", "backslashreplace")
        try:
            is_retry = self._failed_at is not None
            file = self._opened(len(data))
            if is_retry and self._size:
                # The file may end with an incomplete line.
                data = b"\n" + data if _last_byte(self.path) != b"\n" else data
            # Unbuffered, so that written data is not lost if the process is killed.
            written = 0
            while written < len(data):
                written += file.write(data[written:]) or 0
        except (OSError, ValueError) as error:  # ValueError if another thread has closed the file
            self.lost += len(lines)
            self._failed_at = self._now()
            self.problem = f"{type(error).__name__}: {error}"
            self.close()
        else:
            self._size += len(data)
            self._failed_at, self.problem = None, ""

    def _opened(self, more: int) -> BinaryIO:
        if self._file is not None and self._size and self._size + more > self.max_bytes:
            self._rotate()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            hold(self._file)
            self._size = os.fstat(self._file.fileno()).st_size
        return self._file

    def _rotate(self) -> None:
        self.close()
        names = [
            self.path,
            *(self.path.with_name(f"{self.path.name}.{n + 1}") for n in range(self.max_files)),
        ]
        for old, new in zip(reversed(names[:-1]), reversed(names[1:]), strict=True):
            if old.exists():
                os.replace(old, new)
        if not self.max_files:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.problem = f"{type(error).__name__}: {error}"


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
