"""Convert Python values to bytes and back.

User code and arguments are pickled with the standard pickler if possible, and with cloudpickle if necessary
(lambdas, classes of ``__main__``). Only the replica unpickles arguments, and only the caller results.

Buffers of 4 KiB and more stay out of band: an array is not copied into the pickle, and again into a message.
They are copied once, so that later changes of the original have no effect. From 1 MiB, the copy is in memory
that the processes of one machine share (`daskserve.payload.copies`). Such a buffer is read-only after
unpickling, even on another machine, because code must not behave differently there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

from daskserve.common.types import SHARED_BYTES, Message, Payload
from daskserve.errors import ServeError
from daskserve.payload.copies import copy_of

T = TypeVar("T")
#: Returns the replacement to pickle for an object, like ``__reduce__``, or `NotImplemented`.
Substitute: TypeAlias = Callable[[Any], Any]

OUT_OF_BAND_BYTES = 4096
#: Size up to which pickled arguments are searched for the names of Dask's modules.
SEARCHED_BYTES = 16 * 1024


#: Overhead that is counted for each message, so that many small messages also reach the bounds.
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


def dump_with(
    dumps: Callable[..., bytes],
    value: Any,
    out_of_band_bytes: int = OUT_OF_BAND_BYTES,
    *,
    is_final: bool = False,
) -> Payload:
    """Pickle a value with a function that has the parameters of `pickle.dumps`.

    Parameters
    ----------
    is_final
        Whether the value does not change until the payload is dropped, so that large buffers are not copied.
    """
    buffers: list[Any] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < out_of_band_bytes:
            return True
        # The call may be sent later, or be served in this process: the sender may change the original.
        if raw.nbytes >= SHARED_BYTES:
            raw = raw if is_final else copy_of(raw)
        elif not isinstance(raw.obj, bytes):
            raw = memoryview(bytes(raw)) if raw.readonly else memoryview(bytearray(raw))
        buffers.append(raw)
        return False

    data = dumps(value, protocol=5, buffer_callback=keep_in_band)
    return Payload(data, tuple(buffers) if buffers else ())


def dump(value: Any, *, is_final: bool = False) -> Payload:
    """Pickle a value; ``is_final`` is that of `dump_with`.

    Raises
    ------
    Exception
        The value cannot be pickled; picklers raise different types.
    """
    try:
        payload = dump_with(pickle.dumps, value, is_final=is_final)
        # The standard pickler stores functions and classes of __main__ by reference, and the receiver does
        # not have them; cloudpickle stores them by value.
        if bytes(payload.data).find(b"__main__") < 0:  # takes half the time of `in`
            return payload
    except (pickle.PicklingError, TypeError, AttributeError, ImportError):
        pass
    return _dump_by_value(value, is_final=is_final)


def _dump_by_value(
    value: Any,
    out_of_band_bytes: int = OUT_OF_BAND_BYTES,
    substitution: Callable[[], Substitute] | None = None,
    *,
    is_final: bool,
    **options: Any,
) -> Payload:
    # Imported on use, because it takes 20 ms and most processes never need it.
    from daskserve.internals.cloudpickle import CodePickler

    def dump_once(places: Mapping[int, Any]) -> Payload:
        substitute = substitution and substitution()
        dumps = partial(dump_in, CodePickler, places=places, substitute=substitute, **options)
        return dump_with(dumps, value, out_of_band_bytes, is_final=is_final)

    return with_places(dump_once, value, substitution)


def dump_in(pickler: Callable[..., Any], value: Any, **options: Any) -> bytes:
    """Pickle a value with a subclass of `pickle.Pickler`."""
    file = io.BytesIO()
    pickler(file, **options).dump(value)
    return file.getvalue()


def with_places(
    dump_once: Callable[[Mapping[int, Any]], T],
    value: Any,
    substitution: Callable[[], Substitute] | None = None,
) -> T:
    """Pickle a value. An object that cannot be pickled is sent by name if it is a variable of a module.

    ``dump_once`` gets the ids of these objects, with their module and name.
    """
    try:
        return dump_once({})
    except ServeError:
        raise  # the error says what to do
    except Exception:
        # A foreign object may raise anything. The error is raised again unless there is another way to pickle
        # the object.
        from daskserve.internals.cloudpickle import trace

        places, _ = trace(value, substitution)
        if not places:
            raise
    return dump_once(places)


def may_mention_dask(payload: Payload) -> bool:
    """Return whether pickled arguments may contain values of Dask; a fast check without false negatives."""
    if len(payload.data) > SEARCHED_BYTES:
        return True
    data = bytes(payload.data)
    return data.find(b"dask") >= 0 or data.find(b"distributed") >= 0


def dump_code(
    value: Any,
    substitution: Callable[[], Substitute] | None = None,
    classes: dict[type, bool] | None = None,
) -> Payload:
    """Pickle user code like `dump_bytes`, but with large buffers out of band.

    ``substitution`` returns a `Substitute`. ``classes`` gets all classes, with whether this process pickles
    them by value for the first time.
    """
    return _dump_by_value(value, SHARED_BYTES, substitution, is_final=True, classes=classes)


def visit(value: Any, visitor: Substitute) -> None:
    """Call a function with the objects in a value, in the order in which they would be pickled.

    Numbers, text, bytes, lists, tuples, sets and dicts are not visited, but their items are. If the function
    returns a substitute for an object, the parts of the object are not visited.
    """
    from daskserve.internals.cloudpickle import CodePickler

    CodePickler(_Dropped(), protocol=5, buffer_callback=lambda _: False, substitute=visitor).dump(value)


class _Dropped:
    def write(self, data: Any) -> None: ...


def dump_bytes(value: Any) -> bytes:
    """Pickle a value into one byte string, for the store and for start messages."""
    from daskserve.internals.cloudpickle import CodePickler

    return with_places(lambda places: dump_in(CodePickler, value, protocol=5, places=places), value)


def load_bytes(data: bytes) -> Any:
    """Unpickle the result of `dump_bytes`."""
    return pickle.loads(data)
