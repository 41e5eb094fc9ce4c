"""Log a repeated error once, and again when a different error occurs."""

from __future__ import annotations

import logging
import re

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
        """Log an error with its traceback, at level ERROR if its kind is new, else at DEBUG."""
        kind = f"{type(error).__name__}: {_NUMBER.sub('N', str(error))}"
        level = logging.DEBUG if kind == self._logged else logging.ERROR
        self._logged = kind
        self._logger.log(level, text, *args, exc_info=error)
