"""Python values as bytes.

User code and user arguments travel pickled: by the standard pickler where it can, by cloudpickle where it
must (lambdas, classes of ``__main__``). Buffers of 4 KiB and more stay out of band, so an array crosses a
channel without being copied into the pickle. Only the replica (and the caller, for the answer) ever loads
them.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import msgpack

from daskserve.errors import RemoteTraceback, ServeError, UserCodeError
from daskserve.types import Message, Payload

OUT_OF_BAND_BYTES = 4096


#: What a message counts for besides what it carries, so that many small ones are large too.
MESSAGE_BYTES = 256


def message_bytes(message: Message) -> int:
    """Return how much a message of a request counts for where messages are held back or kept."""
    body = message.get("body")
    if body is not None:
        return MESSAGE_BYTES + len(body)
    payload: Payload | None = message.get("payload")
    if payload is not None:
        return MESSAGE_BYTES + payload.nbytes
    return MESSAGE_BYTES + len(message.get("bytes") or message.get("text") or b"")


def _dump_with(dumps: Callable[..., bytes], value: Any) -> Payload:
    buffers: list[Any] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    data = dumps(value, protocol=5, buffer_callback=keep_in_band)
    return Payload(data, tuple(buffers))


def dump(value: Any) -> Payload:
    """Pickle a value.

    Raises
    ------
    Exception
        Whatever the picklers raise for a value that cannot be pickled.
    """
    try:
        payload = _dump_with(pickle.dumps, value)
        # The standard pickler stores functions and classes of __main__ by reference, and they are not there
        # on the other side; cloudpickle stores them by value.
        if b"__main__" not in payload.data:
            return payload
    except (pickle.PicklingError, TypeError, AttributeError, ImportError):
        pass
    import cloudpickle  # 20 ms that most processes never need

    return _dump_with(cloudpickle.dumps, value)


def load(payload: Payload) -> Any:
    """Unpickle a value; imports and runs whatever the pickle says, so never call it on outside data."""
    return pickle.loads(payload.data, buffers=payload.buffers)


def dump_bytes(value: Any) -> bytes:
    """Pickle a value into one byte string, for the store and for start messages."""
    import cloudpickle

    return bytes(cloudpickle.dumps(value, protocol=5))


def load_bytes(data: bytes) -> Any:
    """Unpickle what `dump_bytes` made."""
    return pickle.loads(data)


class PackedError(Exception):
    """An error on its way through a process that must not load it: it may be of code that is not there.

    `dump_error` passes its data on unchanged; who the error is for calls `load_error` on them.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data

    def __str__(self) -> str:
        return str(msgpack.unpackb(self.data)[0])


def dump_error(error: BaseException) -> bytes:
    """Pack an error: a summary, its traceback as text, and the error itself if it can be pickled.

    Our own errors say in their message what the caller needs; the inside of daskserve is no help to them.
    """
    if isinstance(error, PackedError):
        return error.data
    text = "" if isinstance(error, ServeError) else "".join(traceback.format_exception(error))
    try:
        pickled: bytes | None = dump_bytes(error)
    except Exception:  # whatever a foreign __reduce__ raises; the summary then stands in for the error
        pickled = None
    return bytes(msgpack.packb((f"{type(error).__name__}: {error}", text, pickled)))


def load_error(data: bytes) -> BaseException:
    """Return the error that `dump_error` packed, caused by its remote traceback.

    One that cannot be pickled, or whose class does not exist here, comes back as a `UserCodeError`.
    """
    summary, text, pickled = msgpack.unpackb(data)
    try:
        error = load_bytes(pickled) if pickled is not None else None
    except Exception:  # whatever a foreign constructor raises
        error = None
    if not isinstance(error, BaseException):
        error = UserCodeError(summary)
    if text:
        error.__cause__ = RemoteTraceback(text)
    return error
