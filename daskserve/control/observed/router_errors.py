"""The errors of request routers that users wrote, as reported by the processes that route. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daskserve.common.types import BackendTag

#: Lifetime of a report. A process repeats the report while the error persists.
STALE_S = 15.0
#: Time after which the same error of a backend becomes an event again.
REPEAT_S = 3600.0
#: Maximum number of processes that are counted for each backend.
MAX_ROUTERS = 1000


@dataclass(slots=True)
class _ReportedError:
    text: str
    at: float


class RouterErrors:
    """The errors of request routers, by backend; times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._known: dict[BackendTag, dict[str, _ReportedError]] = {}
        self._reported: dict[BackendTag, _ReportedError] = {}

    def report(self, router: str, errors: Mapping[BackendTag, str], now: float) -> list[BackendTag]:
        """Record the errors that a process reports; return the backends for which the error is a new
        event."""
        for tag, known in self._known.items():
            if tag not in errors:
                known.pop(router, None)
        new = []
        for tag, text in errors.items():
            # A process that has ended does not withdraw its reports, so they expire.
            fresh = {name: each for name, each in self._known.get(tag, {}).items() if _is_fresh(each, now)}
            if router in fresh or len(fresh) < MAX_ROUTERS:
                fresh[router] = _ReportedError(text, now)
            self._known[tag] = fresh
            reported = self._reported.get(tag)
            if reported is None or reported.text != text or abs(now - reported.at) >= REPEAT_S:
                self._reported[tag] = _ReportedError(text, now)
                new.append(tag)
        return new

    def text_of(self, tag: BackendTag, now: float) -> str:
        """Return the error of a backend's router, and its number of processes; empty without an error."""
        found = [each for each in self._known.get(tag, {}).values() if _is_fresh(each, now)]
        if not found:
            return ""
        last = max(found, key=lambda each: each.at)
        return last.text if len(found) == 1 else f"{last.text} (in {len(found)} processes)"

    def forget(self, tag: BackendTag) -> None:
        """Drop the errors of a removed backend."""
        self._known.pop(tag, None)
        self._reported.pop(tag, None)


def _is_fresh(error: _ReportedError, now: float) -> bool:
    return abs(now - error.at) < STALE_S  # a clock that was set back has reports of the future
