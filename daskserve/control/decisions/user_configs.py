"""The differences between two values of ``user_config``, for people. Pure.

The values are pickled and may hold anything. Only plain values are read here, because user code must not run
in a controller.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from daskserve.options.fields.secrets import without_secrets

#: Maximum size of a pickle that is read, and maximum number of its values that are compared.
MAX_BYTES, MAX_VALUES = 1 << 20, 10_000
#: Maximum number of differences that are listed, and maximum length of each one.
MAX_LISTED, MAX_TEXT = 20, 120

_PLAIN = (str, int, float, bool, bytes, type(None))


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values, and refuses to import anything."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a plain value")


def changed_values(old: bytes | None, new: bytes | None) -> list[tuple[str, Any, Any]]:
    """Return the path, the old and the new value of each plain value that differs, without secrets.

    Empty if a value is not plain, or has too many parts.
    """
    try:
        one, other = (dict(_leaves("", _loaded(each))) for each in (old, new))
    except _NotPlainError:
        return []
    paths = [each for each in dict.fromkeys([*one, *other]) if _differ(one, other, each)]
    listed = paths[:MAX_LISTED]
    found = [(each, _shown(each, one.get(each)), _shown(each, other.get(each))) for each in listed]
    rest = len(paths) - len(listed)
    return found + ([(f"({rest} more)", None, None)] if rest else [])


class _NotPlainError(Exception):
    """A value is not plain, or is too large."""


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], path: str) -> bool:
    if path not in one or path not in other:
        return True
    return type(one[path]) is not type(other[path]) or one[path] != other[path]


def _loaded(data: bytes | None) -> Any:
    if data is None:
        return {}
    if len(data) > MAX_BYTES:
        raise _NotPlainError
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        # Damaged or hostile bytes may raise any error.
        raise _NotPlainError from error


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a value, each with its path; an empty container counts as a value."""
    rest, count = [(path, value)], 0
    while rest:
        path, value = rest.pop()
        count += 1
        if count > MAX_VALUES:
            raise _NotPlainError  # too many, or containers that contain themselves
        if isinstance(value, dict) and (value or path):
            before = f"{path}." if path else ""
            items = [
                (f"{before}{name!s}", each)
                for name, each in value.items()
                if isinstance(name, str | int | float)
            ]
            if len(items) < len(value):
                raise _NotPlainError
            yield from [] if items else [(path, "{}")]
        elif isinstance(value, list | tuple):
            items = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
            yield from [] if items else [(path, "[]")]
        elif value == {}:
            items = []
        elif isinstance(value, _PLAIN):
            items = []
            yield path, value
        else:
            raise _NotPlainError
        rest += reversed(items)


def _shown(path: str, value: Any) -> Any:
    """Return a value for display, shortened and without secrets."""
    value = without_secrets(path, value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[: MAX_TEXT - 3]}..."
    return value if not isinstance(value, int) or abs(value) < 1 << 63 else "a large integer"
