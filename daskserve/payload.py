"""Convert Python values to bytes and back.

User code and arguments are pickled with the standard pickler if possible, and with cloudpickle if necessary
(lambdas, classes of ``__main__``). Buffers of 4 KiB and more stay out of band, so an array crosses a channel
without being copied into the pickle. Only the replica, and the caller for the result, ever unpickle them.

Buffers of 1 MiB and more are read-only after unpickling. Processes of one machine share their memory, and
code must not depend on where the other process runs.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import msgpack

from daskserve.errors import RemoteTraceback, ServeError, UserCodeError
from daskserve.types import SHARED_BYTES, Message, Payload

OUT_OF_BAND_BYTES = 4096
#: Size up to which pickled arguments are searched for the names of Dask's modules.
SEARCHED_BYTES = 16 * 1024


#: Overhead that each message counts for, so that many small messages reach the bounds, too.
MESSAGE_BYTES = 256


def message_bytes(message: Message) -> int:
    """Return the size of a request's message, for the bounds of buffers."""
    body = message.get("body")
    if body is not None:
        return MESSAGE_BYTES + len(body)
    payload: Payload | None = message.get("payload")
    if payload is not None:
        return MESSAGE_BYTES + payload.nbytes
    return MESSAGE_BYTES + len(message.get("bytes") or message.get("text") or b"")


def dump_with(dumps: Callable[..., bytes], value: Any, out_of_band_bytes: int = OUT_OF_BAND_BYTES) -> Payload:
    """Pickle a value with a function that has the parameters of `pickle.dumps`."""
    buffers: list[Any] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < out_of_band_bytes:
            return True
        buffers.append(raw)
        return False

    data = dumps(value, protocol=5, buffer_callback=keep_in_band)
    return Payload(data, tuple(buffers) if buffers else ())


def dump(value: Any) -> Payload:
    """Pickle a value.

    Raises
    ------
    Exception
        The value cannot be pickled; picklers raise different types.
    """
    try:
        payload = dump_with(pickle.dumps, value)
        # The standard pickler stores functions and classes of __main__ by reference, and the receiver does
        # not have them; cloudpickle stores them by value.
        if bytes(payload.data).find(b"__main__") < 0:  # half the time of `in`
            return payload
    except (pickle.PicklingError, TypeError, AttributeError, ImportError):
        pass
    return dump_with(_dump_code, value)


def _dump_code(value: Any, **how: Any) -> bytes:
    # Imported late: it takes 20 ms, and most processes never need it.
    from daskserve.internals.cloudpickle import CodePickler

    file = io.BytesIO()
    CodePickler(file, **how).dump(value)
    return file.getvalue()


def may_mention_dask(payload: Payload) -> bool:
    """Return whether pickled arguments may hold values of Dask: fast, and without missing any."""
    if len(payload.data) > SEARCHED_BYTES:
        return True
    data = bytes(payload.data)
    return data.find(b"dask") >= 0 or data.find(b"distributed") >= 0


def load(payload: Payload) -> Any:
    """Unpickle a value. A pickle can run any code, so never call this on untrusted data."""
    return payload.load()


#: Returns what to pickle in place of an object, as ``__reduce__`` does, or `NotImplemented`.
Substitute: TypeAlias = Callable[[Any], Any]


def dump_code(
    value: Any, substitute: Substitute | None = None, classes: dict[type, bool] | None = None
) -> Payload:
    """Pickle user code as `dump_bytes` does, with large buffers out of band.

    ``classes`` gets all classes, with whether this process pickles them by value for the first time.
    """
    dumps = partial(_dump_code, substitute=substitute, classes=classes)
    return dump_with(dumps, value, SHARED_BYTES)


def visit(value: Any, visitor: Substitute) -> None:
    """Call a function with the objects in a value, in the order in which they would be pickled.

    It is called with objects that have a class of their own, but not with numbers, text, bytes, lists,
    tuples, sets and dicts. Of an object for which it returns a substitute, nothing else is visited.
    """
    from daskserve.internals.cloudpickle import CodePickler

    CodePickler(_Dropped(), protocol=5, buffer_callback=lambda _: False, substitute=visitor).dump(value)


class _Dropped:
    def write(self, data: Any) -> None: ...


def dump_bytes(value: Any) -> bytes:
    """Pickle a value into one byte string, for the store and for start messages."""
    return _dump_code(value, protocol=5)


def find_unpicklable(value: Any, substitute: Substitute | None = None) -> str:
    """Return in words which part of a value `dump_code` cannot pickle; empty if that is unknown."""
    from daskserve.internals.cloudpickle import find_unpicklable

    return find_unpicklable(value, substitute)


def load_bytes(data: bytes) -> Any:
    """Unpickle the result of `dump_bytes`."""
    return pickle.loads(data)


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


#: The first bytes of a parcel's label; pickles begin differently.
LABEL = b"parcel:"
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Parcel:
    """A pickled callable with large constructor arguments, which travels outside of messages and records.

    Problem: 200 MB of weights would pass through the event loops of the controller and of every replica's
    start. Choice: where user code stands in messages and records, a parcel has a short label. Its content
    goes from the client to the scheduler's process, and from there to each replica, through shared memory if
    they are processes of one machine. The content begins with the digest, which proves that a reader opened
    the right memory. The pickle and its buffers follow, each at a multiple of `ALIGNMENT`.

    Attributes
    ----------
    digest : str
        Of the parts, in hexadecimal digits.
    sizes : tuple of int
        The sizes of the parts: the pickle and its buffers.
    """

    digest: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Any]) -> Self:
        """Return the label of some parts."""
        sizes = tuple(memoryview(each).nbytes for each in parts)
        digest = hashlib.sha256(repr(sizes).encode())
        for each in parts:
            digest.update(each)
        return cls(digest.hexdigest(), sizes)

    @classmethod
    def labelled(cls, code: bytes) -> Self | None:
        """Return the parcel that stands for user code; None if the code itself is there."""
        if not code.startswith(LABEL):
            return None
        digest, sizes = msgpack.unpackb(code[len(LABEL) :])
        return cls(digest, tuple(sizes))

    def label(self) -> bytes:
        """Return the bytes that stand for the parcel's content."""
        return LABEL + bytes(msgpack.packb((self.digest, self.sizes)))

    @property
    def head(self) -> bytes:
        """The first bytes of the content."""
        return bytes.fromhex(self.digest)

    @property
    def size_bytes(self) -> int:
        """The size of the content."""
        return self._ends()[-1]

    def split(self, content: memoryview) -> list[memoryview]:
        """Return the parts in the content."""
        starts = self.starts()
        return [content[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]

    def starts(self) -> list[int]:
        """Return the offset of each part in the content."""
        return self._ends()[:-1]

    def _ends(self) -> list[int]:
        # Each part starts where the one before it ends, rounded up.
        ends = [ALIGNMENT]
        for size in self.sizes:
            ends.append(-(-(ends[-1] + size) // ALIGNMENT) * ALIGNMENT)
        return ends


def pack_code(
    value: Any, substitute: Substitute | None = None, classes: dict[type, bool] | None = None
) -> tuple[bytes, tuple[Any, ...]]:
    """Pickle user code; return what stands for it in messages, and the parts of its parcel, if it is one.

    The other arguments are those of `dump_code`.
    """
    payload = dump_code(value, substitute, classes)
    if payload.nbytes < SHARED_BYTES:
        return bytes(payload.data), ()
    parts = (payload.data, *payload.buffers)
    return Parcel.of(parts).label(), parts


def unpack_code(code: bytes, parts: Sequence[Any]) -> Any:
    """Unpickle the result of `pack_code`."""
    return load(Payload(parts[0], tuple(parts[1:]))) if parts else load_bytes(code)
