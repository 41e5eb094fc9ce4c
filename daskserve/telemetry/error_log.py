"""Logs of errors that recur."""

from __future__ import annotations

import logging
import math
import re
import traceback

#: Number of kinds from which kinds without a recent event are forgotten.
MAX_KINDS = 256
#: Numbers and addresses, which may differ between two occurrences of the same error.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class ErrorLog:
    """Logs the errors of one operation that is repeated, for example every second.

    Two errors are of the same kind if they have the same class and the same text, apart from numbers.
    """

    __slots__ = ("_logged", "_logger")

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged = ""

    def log(self, error: Exception, text: str, *args: object) -> None:
        """Log an error with its traceback, at level ERROR if its kind is new, otherwise at DEBUG."""
        # The ``__str__`` of a user's error may raise; `traceback` handles that.
        kind = _NUMBER.sub("N", "".join(traceback.format_exception_only(error)))
        level = logging.DEBUG if kind == self._logged else logging.ERROR
        self._logged = kind
        self._logger.log(level, text, *args, exc_info=error)


class SparseLog:
    """Decides which events are logged: the first of each kind, then one per period.

    Parameters
    ----------
    period_s : float
        Minimum time between two logged events of a kind.
    """

    __slots__ = ("_kinds", "_period_s")

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        #: For each kind: when the last event was logged, and how many were left out since then.
        self._kinds: dict[str, tuple[float, int]] = {}

    def take(self, kind: str, now: float) -> int | None:
        """Return how many events of a kind were left out since the last logged one; None to leave out this
        event."""
        since, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now - since < self._period_s:
            self._kinds[kind] = since, left_out + 1
            return None
        if len(self._kinds) >= MAX_KINDS:
            recent = {each: last for each, last in self._kinds.items() if now - last[0] < self._period_s}
            self._kinds = recent
        self._kinds[kind] = now, 0
        return left_out
