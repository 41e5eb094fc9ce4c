"""Attributes that many spans have in common. This module needs no OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: How many sets of attributes are known at once.
MAX_KNOWN = 1024


class SharedAttributes:
    """Attributes of many spans; nobody changes them.

    A span that refers to them costs less time and memory than one with a dictionary of its own, and they are
    encoded once.
    """

    __slots__ = ("encoded", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        #: As the encoder has them; empty until it has seen them.
        self.encoded = b""


NOTHING = SharedAttributes({})
USER_CODE = SharedAttributes({"daskserve.step": "user_code"})


class KnownAttributes:
    """The shared attributes of the spans of an instance, by what tells them apart."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], SharedAttributes] = {}

    def get(self, key: tuple[Any, ...], make: Callable[..., Mapping[str, Any]]) -> SharedAttributes:
        """Return the attributes for a key; ``make`` returns them for its items. Any thread may call this."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()  # spans that refer to them keep them
            found = self._known[key] = SharedAttributes(make(*key))
        return found
