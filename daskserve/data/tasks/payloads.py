"""Arguments, results and errors of tasks, as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from daskserve.common.types import Payload
from daskserve.errors import BadRequestError, BodyTooLargeError, ServeError
from daskserve.payload.pickling import dump
from daskserve.payload.unpicklable import arguments_of, unpicklable_error

#: The separator between the summary of an error and its traceback.
_BREAK = "\n\n"
MAX_ERROR = 20_000


def joined(payload: Payload) -> bytes:
    """Return a pickled value and its buffers as one byte string."""
    parts = [bytes(payload.data), *(bytes(memoryview(each).cast("B")) for each in payload.buffers)]
    packed: bytes = msgpack.packb(parts)
    return packed


def parted(data: bytes) -> Payload:
    """Return the pickled value in a result of `joined`."""
    first, *buffers = msgpack.unpackb(data)
    return Payload(first, tuple(buffers))


def load(data: bytes) -> Any:
    """Return the value in a result of `joined`. A pickle can run any code."""
    return parted(data).load()


def checked_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a task; raise `BadRequestError` unless they are a list and a dict, or None."""
    args, kwargs = () if args is None else args, {} if kwargs is None else kwargs
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise BadRequestError(f"args is {args!r:.100}; give a list of arguments")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise BadRequestError(f"kwargs is {kwargs!r:.100}; give a dict of arguments by name")
    return tuple(args), dict(kwargs)


def packed_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int) -> bytes:
    """Return the arguments of a task as bytes.

    Raises
    ------
    UnpicklableError
        An argument cannot be pickled.
    BodyTooLargeError
        They exceed the limit.
    """
    try:
        data = joined(dump((tuple(args), dict(kwargs)), is_final=True))
    except ServeError:
        raise
    except Exception as error:  # a foreign object may raise anything
        remedy = "Pass the values to create it from, and create it where it is used."
        what = f"An argument of task {name!r}"
        raise unpicklable_error(what, error, (args, kwargs), arguments_of(args, kwargs), remedy) from error
    if len(data) > limit:
        raise BodyTooLargeError(
            f"The arguments of task {name!r} take {len(data)} bytes, more than max_payload_bytes={limit}; "
            "store the data elsewhere, and pass its location."
        )
    return data


def digest_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a hash of arguments that is the same in all processes.

    Pickles are not used, because pickles of equal values may differ. For an object, only its type is hashed.
    """
    try:
        text = _canonical([args, kwargs])
    except RecursionError:
        return ""
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _canonical(value: Any) -> str:
    kind = type(value)
    if kind is list or kind is tuple:  # JSON turns tuples into lists
        return f"[{','.join(map(_canonical, value))}]"
    if kind is dict:
        pairs = sorted(f"{_canonical(key)}:{_canonical(each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    if kind is set or kind is frozenset:
        return f"<{','.join(sorted(map(_canonical, value)))}>"
    if kind is int:
        return f"{value:x}"  # hexadecimal has no limit of digits
    if value is None or kind in (bool, float, str, bytes):
        return repr(value)
    return f"({kind.__module__}.{kind.__qualname__})"


def error_text(summary: str, traceback: str) -> str:
    """Return an error as the string that a queue stores."""
    text = f"{summary}{_BREAK}{traceback}"[:MAX_ERROR]
    # File names may contain surrogates, which no queue can store.
    return text.encode("utf-8", "backslashreplace").decode()


def error_parts(text: str) -> tuple[str, str]:
    """Return the summary and the traceback of an error."""
    summary, _, traceback = text.partition(_BREAK)
    return summary, traceback


class DeadLetter:
    """The arguments of a dead letter; those of the failed task are unpickled only where it is handled."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return _letter_arguments, self._parts


def _letter_arguments(kind: str, id: str, name: str, payload: bytes, error: str) -> Any:
    args, kwargs = load(payload)
    summary, traceback = error_parts(error)
    if kind == "failed":
        return (id, summary, list(args), kwargs, traceback), {}
    return (name, id, {"args": list(args), "kwargs": kwargs}, summary, {}), {}


def dead_letter(kind: str, id: str, name: str, payload: bytes, error: str) -> bytes:
    """Return the arguments of a dead letter, in Ray Serve's order."""
    return joined(dump(DeadLetter(kind, id, name, payload, error), is_final=True))
