"""The verb from which the page learns what changes."""

from __future__ import annotations

import os
from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.common.changed_parts import ChangedParts
from daskserve.control.core import MAX_WAIT_S, ControllerCore
from daskserve.control.verbs.history.views import events_after
from daskserve.control.views import views
from daskserve.control.views.overview import overview

#: Least and greatest time between two looks.
PAUSE_S, PERIOD_S = 0.1, 0.5
#: How much longer than a look the pause after it is at least, so that looks take a tenth of the time.
PAUSE_FACTOR = 9
#: Bits of the number of an update; the epoch is above them.
UPDATE_BITS = 40


class OverviewVerbs:
    """See the module."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._parts = ChangedParts(core.epoch << UPDATE_BITS)
        self._cost_s = 0.0
        self._due = 0.0

    @verb
    async def next_overview(
        self, after: int = 0, events_after: int | None = None, timeout_s: float = 0.0
    ) -> dict[str, Any]:
        """Return what has changed of the overview and the events since ``after``, or nothing after a time.

        Parameters
        ----------
        after : int
            The number of the last answer; 0 for all parts.
        events_after : int, optional
            The ``next`` of its events. None: the newest events.
        """
        clock = self._core.clock
        deadline = clock.now() + min(timeout_s, MAX_WAIT_S)
        while True:
            changed = self._core.writer.changed
            await self._look()
            is_all, parts = self._parts.since(after)
            events = self._events(events_after)
            if is_all or parts or events["events"] or clock.now() >= deadline:
                return {"number": self._parts.number, "is_all": is_all, "parts": parts, **events}
            wait_s = max(0.0, min(PERIOD_S, deadline - clock.now()))
            try:
                await clock.wait_for(changed.wait(), max(wait_s, self._due - clock.now()))
            except TimeoutError:
                pass

    def _events(self, after: int | None) -> dict[str, Any]:
        return events_after(self._core.state, after, wall=self._core.clock.wall())

    async def _look(self) -> None:
        """Update the parts, unless another reader has just done so."""
        core = self._core
        if core.clock.now() < self._due:
            await core.clock.sleep(self._due - core.clock.now())
            if core.clock.now() < self._due:
                return  # another reader did meanwhile
        self._due = core.clock.now() + PAUSE_S
        refused = await core.cluster.refused_workers()
        began = core.clock.now()  # a scheduler that is slow to answer costs this process nothing
        controller = {"worker": core.worker, "pid": os.getpid()}
        instance = {
            "instance": core.cluster.instance,
            "epoch": core.epoch,
            "owns_store": core.cluster.store.hold.is_ours,
            "http_urls": views.http_urls(core.state, core.observed),
            "actors": views.system_actors(core.state, core.observed, core.cluster.instance, controller),
            "workers": len(core.observed.workers),
            "unresponsive_workers": sorted(core.observed.unresponsive),
            "refused_workers": dict(refused),
            "problems": {
                **core.cluster.store.problems(),
                **{key: str(error) for key, error in core.corrupt.items()},
            },
        }
        wall = core.clock.wall()
        parts = overview(core.state, core.observed, instance, core.building.waiting, wall)
        self._parts.keep(parts.keys())
        self._parts.update(parts)
        cost_s = core.clock.now() - began
        self._due = core.clock.now() + max(PAUSE_S, PAUSE_FACTOR * cost_s)
