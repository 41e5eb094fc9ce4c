"""The verb that returns the changes of the overview, for the page of an instance."""

from __future__ import annotations

from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.common.changed_parts import ChangedParts
from daskserve.common.clock import processor_time
from daskserve.control.core import MAX_WAIT_S, ControllerCore
from daskserve.control.decisions.history.views import events_after
from daskserve.control.views import actors as actor_views
from daskserve.control.views.overview import overview

#: Minimum and maximum time between two updates of the overview.
PAUSE_S, PERIOD_S = 0.1, 0.5
#: Minimum ratio of the pause after an update to its duration, so that updates take a fifth of the time.
PAUSE_FACTOR = 4
#: Bits of the number of an update; the epoch is above them.
UPDATE_BITS = 40


class OverviewVerbs:
    """The verb for the changes of the overview."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._parts = ChangedParts(core.epoch << UPDATE_BITS)
        self._due = 0.0

    @verb
    async def next_overview(
        self, after: int = 0, events_after: int | None = None, timeout_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the overview's changes and the events since ``after``; empty if there are none before the
        timeout.

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
            if clock.now() >= self._due:
                await self._refresh()
            is_built = bool(self._parts.names())
            number = self._parts.number if is_built else after
            is_all, parts = self._parts.since(after) if is_built else (False, {})
            events = self._events(events_after)
            if parts or (events["events"] and is_built) or clock.now() >= deadline:
                return {"number": number, "is_all": is_all, "parts": parts, **events}
            # Updates of a large instance are rarer, but no answer is later than its deadline.
            await clock.sleep(max(0.0, min(self._due, deadline) - clock.now()))
            try:
                await clock.wait_for(changed.wait(), max(0.0, min(PERIOD_S, deadline - clock.now())))
            except TimeoutError:
                pass

    def _events(self, after: int | None) -> dict[str, Any]:
        return events_after(self._core.state, after, wall=self._core.clock.wall())

    async def _refresh(self) -> None:
        core = self._core
        self._due = core.clock.now() + PAUSE_S
        refused = await core.cluster.refused_workers()
        began = processor_time()  # excludes the wait for the scheduler
        instance = {
            "instance": core.cluster.instance,
            "epoch": core.epoch,
            "owns_store": core.cluster.store.ownership.is_ours,
            "http_urls": actor_views.http_urls(core.state, core.observed),
            "actors": actor_views.system_actors(
                core.state, core.observed, core.cluster.instance, core.process
            ),
            "workers": len(core.observed.workers),
            "unresponsive_workers": sorted(core.observed.unresponsive),
            "refused_workers": dict(refused),
            "problems": core.problems(),
        }
        wall = core.clock.wall()
        parts = overview(core.state, core.observed, instance, core.building.waiting, wall)
        self._parts.keep(parts.keys())
        self._parts.update(parts)
        cost_s = processor_time() - began
        self._due = core.clock.now() + max(PAUSE_S, PAUSE_FACTOR * cost_s)
