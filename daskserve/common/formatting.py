"""Numbers and strings in messages, and whole numbers in options."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

#: Magnitudes below this are rounding errors.
_NOTHING = 1e-6
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def as_whole(value: Any) -> int | None:
    """Return a whole number of any type as an int; None for any other value.

    Examples
    --------
    >>> as_whole(8), as_whole(8.0), as_whole(8.5), as_whole("8"), as_whole(True)
    (8, 8, None, None, None)
    """
    if isinstance(value, bool):
        return None
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else None


def whole_seconds(delay_s: Any) -> int | None:
    """Return a delay in whole seconds for ``Retry-After``, at least 1; None if it is not a finite number.

    Examples
    --------
    >>> whole_seconds(2.1), whole_seconds(0), whole_seconds(float("inf")), whole_seconds(None)
    (3, 1, None, None)
    """
    is_number = isinstance(delay_s, (int, float)) and math.isfinite(delay_s)
    return max(1, math.ceil(delay_s)) if is_number else None


def shown(value: float) -> str:
    """Return a number with at most three decimals, or with three significant digits if it is below 1.

    Examples
    --------
    >>> shown(1 - 0.9 - 0.1), shown(2.0), shown(1 / 3), shown(1e7)
    ('0', '2', '0.333', '10000000')
    """
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude < _NOTHING:
        return "0"
    decimals = 3 if magnitude >= 1 else 2 - math.floor(math.log10(magnitude))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".")


def shown_size(count: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1.

    Examples
    --------
    >>> shown_size(512), shown_size(1536), shown_size(3 << 30)
    ('512 bytes', '1.5 KiB', '3 GiB')
    """
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{shown(round(count, 2))} {_UNITS[unit]}"


def encodable(text: str) -> str:
    r"""Return a string that UTF-8 can encode.

    Surrogates, which Python puts into the names of files that are not UTF-8, become backslash escapes.

    Examples
    --------
    >>> encodable("caf\udce9.csv") == "caf\\udce9.csv", encodable("café.csv")
    (True, 'café.csv')
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def capitalized(text: str) -> str:
    """Return a string with a capital first letter, to begin a sentence."""
    return text[:1].upper() + text[1:]


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number with a noun, and optionally a verb, in the singular or the plural.

    Examples
    --------
    >>> counted(1, "replica"), counted(2, "replica"), counted(0, "request waits", "requests wait")
    ('1 replica', '2 replicas', '0 requests wait')
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"
