"""Rules for the bodies of HTTP requests, combined from the options of several backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daskserve.common.types import BodyUse


def combined(
    rules: Iterable[tuple[BodyUse | None, int | None]], default_max_bytes: int
) -> tuple[BodyUse, int] | None:
    """Return the rules for a request to any of several backends; None until those of all are known."""
    uses, limits = set[BodyUse](), list[int]()
    for use, max_bytes in rules:
        if use is None:
            return None
        uses.add(use)
        limits.append(default_max_bytes if max_bytes is None else max_bytes)
    combined_use: BodyUse = "gather" if "gather" in uses else "drop" if uses == {"drop"} else "stream"
    return combined_use, max(limits, default=default_max_bytes)


class BodyLimits:
    """The maximum body sizes of all backends that a process calls."""

    def __init__(self) -> None:
        self._unknown: set[str] = set()
        self._max_bytes: dict[str, int] = {}

    @property
    def largest_bytes(self) -> float:
        """The largest size that a backend sets; 0 if no backend sets one, infinity until all are
        published."""
        return math.inf if self._unknown else max(self._max_bytes.values(), default=0)

    def watched(self, key: str, note: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a watcher of an endpoint or backend; it calls ``note``, then records its size."""

        def update(value: Mapping[str, Any] | None) -> None:
            note(value)
            self.forget(key)
            published = () if value is None else (value, (value.get("rollout") or {}).get("new") or {})
            limits = [each["max_body_bytes"] for each in published if "max_body_bytes" in each]
            if limits:
                self._max_bytes[key] = max(limits)

        self._unknown.add(key)
        return update

    def forget(self, key: str) -> None:
        """Forget a key that is no longer watched."""
        self._unknown.discard(key)
        self._max_bytes.pop(key, None)
