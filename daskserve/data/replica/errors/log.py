"""Logs the errors of user code: one record for each error, with the id of the request.

Only the replica that raises an error logs it (`daskserve.payload.packed_errors.is_logged`). The record has
the text of the packed error, so handlers of `logging` run no code of the error's class.

A refusal (`daskserve.errors.REFUSALS`) that user code raises again is not its failure. It is logged as one
line without a traceback, at most every `REFUSALS_S`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from daskserve.common.clock import stopwatch
from daskserve.common.types import short_tag
from daskserve.context import RequestContext
from daskserve.data.replica.errors.rules import add_rule
from daskserve.errors import REFUSALS, ServeError, UserCodeError
from daskserve.payload.error_text import name_of, user_frames
from daskserve.payload.packed_errors import PackedError, is_logged, note_logged, pack_now
from daskserve.telemetry.error_log import SparseLog

logger = logging.getLogger("daskserve.replica")

#: Errors that user code raises as a response, or because the client has disconnected.
NOT_FAILURES = (HTTPException, ClientDisconnect)
#: Minimum time between two lines about refusals of the same class.
REFUSALS_S = 10.0


class _EnduringLogger(logging.Logger):
    """A logger that `logging.config` can configure, but not disable."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass


def keep_loggers_enabled() -> None:
    """Keep the loggers of daskserve enabled when user code configures logging.

    ``logging.config.dictConfig`` and ``fileConfig`` disable all existing loggers that they do not name.
    """
    for name, known in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "daskserve" and type(known) is logging.Logger:
            known.__class__ = _EnduringLogger


def pack_raised(error: BaseException) -> PackedError | None:
    """Add the note of its rule to an error, and pack the error like `pack_now`."""
    add_rule(error)
    return pack_now(error)


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is a refusal, perhaps by another deployment that user code has called."""
    return issubclass(error.kind if type(error) is PackedError else type(error), REFUSALS)


def is_failure(error: PackedError) -> bool:
    """Return whether to log the error of a call: a caller's mistake and a response are not logged."""
    if issubclass(error.kind, ServeError):
        return issubclass(error.kind, (UserCodeError, *REFUSALS))
    return not issubclass(error.kind, NOT_FAILURES)


def is_http_failure(error: PackedError) -> bool:
    """Return whether to log the error of an HTTP request, whose client does not see the error."""
    return not issubclass(error.kind, ClientDisconnect)


class FailureLog:
    """Logs the errors of one replica's user code."""

    def __init__(self, replica_tag: str) -> None:
        self._replica_tag = short_tag(replica_tag)
        self._refusals = SparseLog(REFUSALS_S)

    def logs_for(self, request: RequestContext | None) -> Callable[..., None]:
        """Return `log`, or `log_in_short` if the caller immediately shows the error to its user."""
        return self.log if request is None or not request.is_shown else self.log_in_short

    def log_in_short(self, error: PackedError, *request_ids: str) -> None:
        """Log an error in one line, because its caller, a notebook, shows its traceback."""
        if not is_logged(error, request_ids[0]):
            note_logged(error, *request_ids)
            logger.error("Request %s to %s failed: %s", request_ids[0], self._replica_tag, error.summary)

    def log(self, error: PackedError, *request_ids: str) -> None:
        """Log an error, unless this or another replica has logged it for the same request."""
        if is_logged(error, request_ids[0]):
            return
        note_logged(error, *request_ids)
        try:
            self._log(error, ", ".join(request_ids))
        # A user's logging filter may raise any error; the caller must get its answer in any case.
        except Exception:
            logger.warning("An error of user code could not be logged: %s", error.summary)

    def _log(self, error: PackedError, names: str) -> None:
        if not is_refusal(error):
            log_error(error, "Request %s to %s failed", names, self._replica_tag)
            return
        left_out = self._refusals.take(name_of(error.kind), stopwatch())
        if left_out is not None:
            others = f" ({left_out} more since the last such line)" if left_out else ""
            logger.warning("Request %s to %s failed: %s%s", names, self._replica_tag, error.summary, others)


def log_error(error: PackedError, text: str, *args: object) -> None:
    """Log an error with its traceback."""
    if not logger.isEnabledFor(logging.ERROR):
        return
    found, error.error = error.error, None  # the error refers to the user's object
    if found is None:
        found = UserCodeError(error.summary)
    info = (type(found), found, user_frames(found))
    file, line, function, _ = logger.findCaller()
    record = logger.makeRecord(logger.name, logging.ERROR, file, line, text, args, info, function)
    record.exc_text = error.text.rstrip()
    logger.handle(record)
