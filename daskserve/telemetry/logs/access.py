"""The lines of the access log of a process, from the request that ends to the sink that writes them.

Problem: a thread that formats lines holds the interpreter lock, which the event loops need. Formatting in
that thread also takes twice as long, because the objects of ended requests have left the processor's caches.

Choice: the caller that adds the last line of a batch formats the batch at once, while it is in the caches.
The log thread only joins and writes formatted lines; it also formats the rest when no more lines arrive.
Adding a line never waits for a file or for another thread.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from daskserve.telemetry.error_log import ErrorLog
from daskserve.telemetry.logs.records import AccessLine

logger = logging.getLogger("daskserve.logging")

#: How many lines are formatted at once: fewer lines cost more each, more lines would hold an event loop for
#: longer.
BATCH = 256
#: Maximum number of formatted lines that wait for the thread; later ones are dropped.
MAX_READY = 10_000

Format: TypeAlias = Callable[[AccessLine], str]
#: The destination of lines.
Target = TypeVar("Target", bound=Hashable)


class AccessLines(Generic[Target]):
    """Access lines that wait to be written.

    Parameters
    ----------
    place_of : callable
        Returns how the lines of a replica or a proxy are formatted, and where they go.
    is_for_handlers : callable
        Returns whether lines are kept for the handlers of their logger.
    keep : callable
        Called with all lines, also with those that are dropped.
    wake : callable
        Called after each line.

    Attributes
    ----------
    dropped : int
        How many lines were lost.
    """

    def __init__(
        self,
        place_of: Callable[[str], tuple[Format, Sequence[Target]]],
        is_for_handlers: Callable[[], bool],
        keep: Callable[[Sequence[AccessLine]], object],
        wake: Callable[[], object],
    ) -> None:
        self._place_of = place_of
        self._is_for_handlers = is_for_handlers
        self._keep = keep
        self._wake = wake
        self.dropped = 0
        self._errors = ErrorLog(logger)
        self._pending: list[AccessLine] = []
        #: Held while lines are formatted, and while formatted lines are taken.
        self._formatting = threading.Lock()
        self._ready: dict[Target, list[str]] = defaultdict(list)
        self._for_handlers: list[AccessLine] = []
        self._count = 0

    def add(self, line: AccessLine) -> None:
        """Take a line; see `daskserve.telemetry.logs.records.Access` for its fields."""
        pending = self._pending
        pending.append(line)
        # If another thread is formatting, this one does not wait for it; the next line tries again.
        if len(pending) >= BATCH and self._formatting.acquire(blocking=False):
            try:
                self._format()
            finally:
                self._formatting.release()
        self._wake()

    def take(self) -> tuple[Mapping[Target, Sequence[str]], Sequence[AccessLine]]:
        """Return the formatted lines by destination, and the lines for handlers."""
        with self._formatting:
            self._format()
            ready, lines = self._ready, self._for_handlers
            self._ready, self._for_handlers, self._count = defaultdict(list), [], 0
            return ready, lines

    def _format(self) -> None:
        taken = self._pending[:]
        del self._pending[: len(taken)]  # in one step, because other threads add lines at the same time
        if not taken:
            return
        self._keep(taken)
        if self._count + len(taken) > MAX_READY:
            # A handler may hang; the lines are still in the logs in memory.
            self.dropped += len(taken)
            return
        self._count += len(taken)
        if self._is_for_handlers():
            self._for_handlers += taken
        known: dict[str, tuple[Format, list[Callable[[str], object]]]] = {}
        for line in taken:
            name = line[12] or line[13]
            try:
                form, adds = known[name]
            except KeyError:
                form, targets = self._place_of(name)
                adds = [self._ready[each].append for each in targets]
                known[name] = form, adds
            if adds:
                try:
                    text = form(line)
                except Exception as error:  # errors must not reach the request whose thread formats
                    self.dropped += 1
                    self._errors.log(error, "A line of the access log could not be formatted")
                    continue
                for append in adds:
                    append(text)
