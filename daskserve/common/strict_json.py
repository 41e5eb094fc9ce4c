"""JSON of any values, in a form that every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

#: Maximum length of a ``repr``.
MAX_SHOWN = 10_000
_ENCODER = json.JSONEncoder(allow_nan=False)


def strict_json(value: Any) -> str:
    """Return a value as JSON; types, numbers and keys that JSON does not have become their ``repr``.

    Examples
    --------
    >>> strict_json({"loss": float("nan"), (1, 2): {3}})
    '{"loss": "nan", "(1, 2)": "{3}"}'
    """
    try:
        # No default function for other objects, because encoding would take ten times as long.
        return _ENCODER.encode(value)
    except (ValueError, TypeError, RecursionError):
        return _ENCODER.encode(_plain(value, ()))


def _plain(value: Any, around: tuple[int, ...]) -> Any:
    try:
        if _is_encodable(value):
            return value
        if isinstance(value, float):
            return _shown(float(value))
        if id(value) not in around and len(around) < 100:
            inside = (*around, id(value))
            if isinstance(value, Mapping):
                return {_key(key): _plain(each, inside) for key, each in tuple(value.items())}
            if isinstance(value, (list, tuple)):
                return [_plain(each, inside) for each in value]
    except Exception:  # user code may raise, or another thread may change the value
        pass
    return _shown(value)


def _key(key: Any) -> Any:
    try:
        return key if _is_encodable(key) else _shown(key)
    except ValueError:
        return _shown(key)


def _is_encodable(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        int.__repr__(value)  # raises a ValueError for more than 4,300 digits
    return value is None or isinstance(value, (str, int))


def _shown(value: Any) -> str:
    try:
        found = repr(value)
    except Exception as error:  # user code may raise anything
        return f"<{type(value).__name__}: {type(error).__name__} in its repr>"
    return found if len(found) <= MAX_SHOWN else f"{found[:MAX_SHOWN]}..."
