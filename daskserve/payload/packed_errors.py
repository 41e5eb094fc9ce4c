"""Errors as bytes, with their tracebacks and with the note that they are logged."""

from __future__ import annotations

import traceback

import msgpack

from daskserve.errors import RemoteTraceback, ServeError, UserCodeError
from daskserve.payload.pickling import dump_bytes, load_bytes

#: The attribute of an error that holds the ids of the requests for which a replica has logged it.
_LOGGED_FOR = "_daskserve_logged_for"


def note_logged(error: BaseException, *request_ids: str) -> None:
    """Record that a replica has logged an error; the note travels with the error to other processes."""
    # Not by setattr, which a user's class may refuse.
    vars(error)[_LOGGED_FOR] = request_ids


def is_logged(error: BaseException, request_id: str | None = None) -> bool:
    """Return whether the replica that raised an error has logged it, for a request or for any."""
    request_ids = vars(error).get(_LOGGED_FOR)
    if request_ids is None:
        return False
    return request_id is None or request_id in request_ids


class PackedError(Exception):
    """An error that passes through a process that cannot unpickle it, because its class may be missing there.

    `dump_error` forwards the data unchanged; the receiver calls `load_error` on them.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data
        _copy_note(msgpack.unpackb(data)[3], self)

    def __str__(self) -> str:
        return str(msgpack.unpackb(self.data)[0])


def dump_error(error: BaseException) -> bytes:
    """Pack an error: a summary, its traceback, the error itself if it can be pickled, and its `note_logged`.

    Errors of daskserve are packed without a traceback: their message is complete, and internals do not help
    the caller.
    """
    if isinstance(error, PackedError):
        return error.data
    text = "" if isinstance(error, ServeError) else "".join(traceback.format_exception(error))
    try:
        pickled: bytes | None = dump_bytes(error)
    except Exception:  # a user's __reduce__ may raise anything; the summary then replaces the error
        pickled = None
    request_ids = vars(error).get(_LOGGED_FOR)
    return bytes(msgpack.packb((f"{type(error).__name__}: {error}", text, pickled, request_ids)))


def load_error(data: bytes) -> BaseException:
    """Return the error that `dump_error` packed, caused by its remote traceback.

    An error that was not picklable, or whose class does not exist here, becomes a `UserCodeError`.
    """
    summary, text, pickled, request_ids = msgpack.unpackb(data)
    try:
        error = load_bytes(pickled) if pickled is not None else None
    except Exception:  # a user's constructor may raise anything
        error = None
    if not isinstance(error, BaseException):
        error = UserCodeError(summary)
    if text:
        error.__cause__ = RemoteTraceback(text)
    _copy_note(request_ids, error)
    return error


def _copy_note(request_ids: list[str] | None, error: BaseException) -> None:
    if request_ids is not None:
        note_logged(error, *request_ids)
