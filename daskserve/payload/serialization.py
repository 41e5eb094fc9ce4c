"""The serializations of arguments and results that can be set in a handle's options.

``"msgpack"`` and ``"orjson"`` refuse objects of user classes, so that these are never sent by accident. The
encoded value is wrapped in a pickle, which the receiver loads like any other value.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from daskserve.common.types import Payload
from daskserve.errors import BadRequestError
from daskserve.payload.error_text import text_of
from daskserve.payload.pickling import dump, dump_with

DEFAULT_SERIALIZATION = "cloudpickle"


def _encode_json(value: Any) -> bytes:
    import orjson

    data: bytes = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return data


def _decode_json(data: bytes) -> Any:
    import orjson

    return orjson.loads(data)


def _decode_msgpack(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


_ENCODERS: Mapping[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "msgpack": (msgpack.packb, _decode_msgpack),
    "orjson": (_encode_json, _decode_json),
}
SERIALIZATIONS = (DEFAULT_SERIALIZATION, "pickle", *_ENCODERS)


class _Encoded:
    """An encoded value; unpickling it returns the value itself."""

    def __init__(self, serialization: str, data: bytes) -> None:
        self._parts = (serialization, data)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, bytes]]:
        return decode, self._parts


def decode(serialization: str, data: bytes) -> Any:
    """Return the value that `serialize` encoded in a format other than pickle."""
    return _ENCODERS[serialization][1](data)


def check_serialization(option: str, value: Any) -> None:
    """Raise `BadRequestError`, a `ValueError`, unless an option names a serialization that works here."""
    if value not in SERIALIZATIONS:
        raise BadRequestError(f"{option} must be one of {', '.join(SERIALIZATIONS)}; got {value!r}.")
    if value == "orjson":
        try:
            import orjson  # noqa: F401
        except ImportError:
            raise BadRequestError(
                f"{option} is 'orjson', which is not installed; install it in this program and on the "
                "workers: pip install orjson."
            ) from None


def serialize(serialization: str, value: Any) -> Payload:
    """Serialize a value.

    Raises
    ------
    BadRequestError
        The value cannot be written in this format.
    Exception
        The value cannot be pickled; picklers raise different types.
    """
    if serialization == DEFAULT_SERIALIZATION:
        return dump(value)
    if serialization == "pickle":
        return dump_with(pickle.dumps, value)
    try:
        data = _ENCODERS[serialization][0](value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequestError(
            f"The value cannot be serialized with {serialization}: {text_of(error)}"
        ) from error
    return dump_with(pickle.dumps, _Encoded(serialization, data))
