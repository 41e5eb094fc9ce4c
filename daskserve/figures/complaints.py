"""What goes wrong again and again is told once, and again when something else goes wrong."""

from __future__ import annotations

import logging
import re

#: Numbers and addresses differ from one time to the next where all else is the same.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class Complaint:
    """The log's end of one thing that is tried every second, say.

    An error is of the same kind as the one before if it has the same class and, but for numbers, the same
    text.
    """

    __slots__ = ("_logged", "_logger")

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged = ""

    def log(self, error: Exception, text: str, *args: object) -> None:
        """Log an error with its traceback: as an error if it is of another kind than the last one."""
        kind = f"{type(error).__name__}: {_NUMBER.sub('N', str(error))}"
        level = logging.DEBUG if kind == self._logged else logging.ERROR
        self._logged = kind
        self._logger.log(level, text, *args, exc_info=error)
