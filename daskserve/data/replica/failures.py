"""Errors of user code in the log: one record for each, by the replica, with the id of the request.

The parts of daskserve that an error passes on its way to the client do not log it again
(`daskserve.payload.packed_errors.is_logged`), nor do other replicas that it passes through.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from daskserve.context import current_replica
from daskserve.data.replica.rules import add_rule
from daskserve.errors import ServeError, UserCodeError
from daskserve.payload.packed_errors import is_logged, note_logged
from daskserve.types import short_tag

logger = logging.getLogger("daskserve.replica")

#: Errors that user code raises as a response, or because the client has disconnected.
NOT_FAILURES = (HTTPException, ClientDisconnect)


class _EnduringLogger(logging.Logger):
    """A logger that `logging.config` cannot disable; its level and its handlers can be configured."""

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


def log_failure(error: BaseException, *request_ids: str, replica_tag: str = "") -> None:
    """Log an error of user code, unless this or another replica has logged it for the same request.

    Parameters
    ----------
    replica_tag : str
        By default, the tag of the replica that the current code runs in.
    """
    if request_ids and is_logged(error, request_ids[0]):
        return
    note_logged(error, *request_ids)
    add_rule(error)
    replica = current_replica.get()
    logger.error(
        "Request %s to %s failed",
        ", ".join(request_ids),
        short_tag(replica_tag or (replica.replica_tag if replica else "a backend")),
        exc_info=(type(error), error, user_frames(error)),
    )


def is_failure(error: BaseException) -> bool:
    """Return whether an error is one of user code, neither of daskserve nor a response."""
    if isinstance(error, ServeError):
        return isinstance(error, UserCodeError)
    return not isinstance(error, NOT_FAILURES)


def user_traceback(error: BaseException) -> str:
    """Return an error's traceback as text, from the first frame that is not ours."""
    return "".join(traceback.format_exception(type(error), error, user_frames(error)))


def user_frames(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the first frame that is not ours."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    return frames or error.__traceback__


def _is_ours(module: str) -> bool:
    return module.startswith(("daskserve.data.", "daskserve.payload."))
