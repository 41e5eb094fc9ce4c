"""The thread that writes the sampled requests of a replica to its sink.

Problem: a sink may hang, be full or be absent for hours, and a redacting function is user code. Neither may
delay a request. Choice: the loop only adds samples to a bounded queue. A thread takes them, and retries
failed writes; when the queue is full, further samples are dropped and counted. Object stores cannot append,
so the samples of some seconds become one file, whose name does not change if the write is repeated.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from daskserve.common.clock import stopwatch, time_of_day
from daskserve.telemetry.error_log import SparseLog
from daskserve.telemetry.payloads.events import Origin, Sample, events_of, line_of

logger = logging.getLogger("daskserve.payloads")

#: Limits of the number and the size of samples that wait for the thread.
MAX_WAITING, MAX_WAITING_BYTES = 1000, 32 << 20
#: Size at which a file is written before its interval is over.
FILE_BYTES = 4 << 20
#: Time after which a sink that failed is tried again.
RETRY_S = 2.0
#: Interval at which a failure of the same kind is logged again.
LOG_EVERY_S = 60.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

#: Writes a file of a sink: its path below the sink's folder, and the content.
Write = Callable[[str, bytes], None]


def open_sink(url: str) -> Write:
    """Return a function that writes files to a folder that fsspec opens."""
    from fsspec.core import url_to_fs  # slow to import, and most processes do not need it

    system, root = url_to_fs(url)

    def write(path: str, data: bytes) -> None:
        whole = f"{root.rstrip('/')}/{path}"
        system.makedirs(whole.rpartition("/")[0], exist_ok=True)
        system.pipe_file(whole, data)

    return write


@dataclass(slots=True)
class _File:
    """The next file: its lines, the number of their requests, and its path, which is kept after a failure."""

    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    requests: int = 0
    path: str = ""


class PayloadWriter:
    """Writes samples until it is closed.

    Parameters
    ----------
    open_sink : callable
        Returns a function that writes a file; called in the thread.
    load_redact : callable
        Returns the user's function, or None if there is none; called in the thread.
    masked : callable
        Removes secrets from the text of an error.
    """

    def __init__(
        self,
        origin: Origin,
        open_sink: Callable[[], Write],
        load_redact: Callable[[], Callable[[dict[str, Any]], Any] | None],
        *,
        mode: str,
        flush_period_s: float,
        masked: Callable[[str], str] = str,
    ) -> None:
        self._origin = origin
        self._open_sink = open_sink
        self._load_redact = load_redact
        self._mode = mode
        self._masked = masked
        self._flush_period_s = flush_period_s
        self._queue: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._taken_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._write: Write | None = None
        self._redact: Any = None
        self._is_redact_loaded = False
        self._said = SparseLog(LOG_EVERY_S)
        self._file = _File()
        #: How many samples were queued, and taken by the thread.
        self._offered = self._taken = 0
        self.written = 0
        self.dropped: dict[str, int] = defaultdict(int)

    # ---- on the loop

    def offer(self, sample: Sample) -> None:
        """Take a sample that is complete, or drop it."""
        size = sample.nbytes
        waiting = self._waiting_bytes - self._taken_bytes
        if self._queue.qsize() >= MAX_WAITING or waiting + size > MAX_WAITING_BYTES:
            self.dropped["queue"] += 1
            return
        self._waiting_bytes += size
        self._offered += 1
        self._queue.put(sample)
        if self._thread is None:
            name = f"daskserve-payloads-{self._origin.replica}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write the waiting samples for a limited time, then end; this blocks."""
        self._is_closing.set()
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.dropped["stop"] += self._offered - self._taken + self._file.requests

    def counts(self, labels: tuple[str, ...]) -> Iterable[tuple[str, tuple[str, ...], int]]:
        """Return the metrics."""
        yield "payload_log_requests", labels, self.written
        for reason, count in tuple(self.dropped.items()):
            yield "payload_log_dropped", (*labels, reason), count

    # ---- in the thread

    def _work(self) -> None:
        is_ended = False
        while not is_ended:
            is_ended = self._gather(stopwatch() + self._flush_period_s)
            while self._file.lines and not self._flush():
                if self._is_closing.wait(RETRY_S):
                    is_ended = True
                    if not self._flush():
                        self.dropped["sink"] += self._file.requests
                        self._file = _File()
        if left := sum(each is not None for each in self._rest()):
            self.dropped["stop"] += left

    def _rest(self) -> Iterator[Sample | None]:
        while True:
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return

    def _gather(self, until: float) -> bool:
        """Take samples until a file is full or due; return whether the writer was closed."""
        while self._file.size < FILE_BYTES:
            left = until - stopwatch()
            try:
                # Without lines, there is no deadline for writing.
                sample = self._queue.get(timeout=max(0.0, left) if self._file.lines else None)
            except queue.Empty:
                return False
            if sample is None:
                return True
            if not self._file.lines:
                until = stopwatch() + self._flush_period_s
            self._taken_bytes += sample.nbytes
            self._taken += 1
            self._add(sample)
        return False

    def _add(self, sample: Sample) -> None:
        lines = []
        try:
            if not self._is_redact_loaded:
                self._redact = self._load_redact()
                self._is_redact_loaded = True
            events: Iterable[Any] = events_of(sample, self._origin, self._mode)
            for event in events:
                found = event if self._redact is None else self._redact(event)
                if found is not None:
                    lines.append(line_of(dict(found)))
        except BaseException as error:  # even SystemExit in user code must not end the thread
            # Raised by the user's function, or by a value that cannot be unpickled or shown. The error's text
            # might quote values that must not be written.
            what = "events" if self._redact is None and self._is_redact_loaded else "redact"
            self.dropped[what] += 1
            self._say(what, f"{type(error).__name__} in making it")
            return
        self._file.lines += lines
        self._file.size += sum(map(len, lines))
        self._file.requests += bool(lines)

    def _flush(self) -> bool:
        """Write the lines as a file; return False if that failed."""
        file = self._file
        if not file.path:
            file.path = self._new_path()
        try:
            if self._write is None:
                self._write = self._open_sink()
            self._write(file.path, b"".join(file.lines))
        except Exception as error:  # any file system library may raise anything
            self._say("sink", self._masked(f"{type(error).__name__}: {error}"))
            return False
        self.written += file.requests
        self._file = _File()
        return True

    def _new_path(self) -> str:
        origin, now = self._origin, datetime.fromtimestamp(time_of_day(), UTC)
        folders = [origin.instance, origin.application or "-", origin.deployment, f"{now:%Y-%m-%d}"]
        # Another writer of this replica, after a change of options, must not use the same name.
        name = f"{now:%H%M%S.%f}_{origin.replica}.jsonl"
        return "/".join(_UNSAFE.sub("-", each) for each in (*folders, name))

    def _say(self, kind: str, text: str) -> None:
        if self._said.take(kind, stopwatch()) is None:
            return
        origin = self._origin
        place = f"{origin.application}/{origin.deployment}#{origin.replica}"
        if kind == "sink":
            logger.warning("The sink of the payload log of %s fails, and is tried again: %s", place, text)
        else:
            logger.warning("The payload log of %s drops a request: %s", place, text)
