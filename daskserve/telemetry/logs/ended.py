"""The logs of child processes that have ended: their last records often explain why."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

#: Number of ended processes whose logs a worker keeps, and approximate maximum size of each.
MAX_FILES, FILE_BYTES = 32, 256 << 10


class ProcessFile(NamedTuple):
    """The file to which the child process of a replica logs; its name is the tag of the replica."""

    name: str
    instance: str
    descriptor: int


class EndedFiles:
    """Keeps the files of the last child processes that have ended. All calls come from one thread."""

    def __init__(self) -> None:
        self._files: deque[ProcessFile] = deque()

    def add(self, file: ProcessFile) -> None:
        """Keep the last part of a file, whose descriptor the caller may close afterwards."""
        own = os.dup(file.descriptor)
        with suppress(OSError):
            size = os.fstat(own).st_size
            if size > FILE_BYTES:
                kept = os.pread(own, FILE_BYTES, size - FILE_BYTES)
                os.pwrite(own, kept, 0)
                os.ftruncate(own, len(kept))
        self._files.append(file._replace(descriptor=own))
        while len(self._files) > MAX_FILES:
            os.close(self._files.popleft().descriptor)

    def __iter__(self) -> Iterator[ProcessFile]:
        return iter(tuple(self._files))

    def close(self) -> None:
        """Drop all files."""
        while self._files:
            os.close(self._files.popleft().descriptor)
