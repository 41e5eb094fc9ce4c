"""The status for clients that wait for a change of it, built once for all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from daskserve.common.clock import Clock
from daskserve.control.records.storing.writer import Writer

#: Minimum and maximum time between two builds of the status.
STATUS_PAUSE_S, STATUS_PERIOD_S = 0.1, 1.0
#: Tolerance for rounding errors of these times.
_LEEWAY_S = 0.001


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The status at one time, its id, and the number of changes written until then."""

    at: float
    changes: int
    seen: str
    status: dict[str, Any]


class WatchedStatus:
    """The last status, which all watchers share.

    Changes of records wake the watchers. Observations, such as a slow start, are read once a period. The
    status is built at most once in each pause, regardless of the number of watching clients.
    """

    def __init__(self, clock: Clock, build: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._clock = clock
        self._build = build
        self._building = asyncio.Lock()
        self._last: _Snapshot | None = None

    async def next(self, writer: Writer, seen: str, deadline: float) -> dict[str, Any]:
        """Return the status once its id is not ``seen``; without it after the deadline."""
        clock = self._clock
        while True:
            changed, snapshot = writer.changed, await self._current(writer, seen)
            if snapshot.seen != seen:
                return {"seen": snapshot.seen, "status": snapshot.status}
            if clock.now() >= deadline:
                return {"seen": seen, "status": None}
            # Combine changes in quick succession.
            await clock.sleep(max(0.0, min(snapshot.at + STATUS_PAUSE_S, deadline) - clock.now()))
            until = min(snapshot.at + STATUS_PERIOD_S, deadline)
            try:
                await clock.wait_for(changed.wait(), max(0.0, until - clock.now()))
            except TimeoutError:
                pass

    async def _current(self, writer: Writer, seen: str) -> _Snapshot:
        async with self._building:
            last = self._last
            if last is None or not self._is_good(last, writer, seen):
                changes, at, status = writer.changes, self._clock.now(), await self._build()
                text = json.dumps(status, sort_keys=True, default=str)
                digest = blake2b(text.encode(), digest_size=8).hexdigest()
                last = self._last = _Snapshot(at, changes, digest, status)
            return last

    def _is_good(self, last: _Snapshot, writer: Writer, seen: str) -> bool:
        """Return whether a status is new enough; a watcher without a status needs the current one."""
        age_s = self._clock.now() - last.at + _LEEWAY_S
        if seen and age_s < STATUS_PAUSE_S:
            return True
        return last.changes == writer.changes and age_s < STATUS_PERIOD_S
