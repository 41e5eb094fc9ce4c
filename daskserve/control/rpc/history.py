"""The verbs for the history of an instance: revisions, rollback and events."""

from __future__ import annotations

from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.common import settings
from daskserve.common.types import GoalId
from daskserve.control.core import MAX_WAIT_S
from daskserve.control.decisions.goals import ChangeLimits
from daskserve.control.decisions.history import rollback as rollback_decisions
from daskserve.control.decisions.history.views import MAX_EVENTS, events_after, history_of
from daskserve.control.rpc.locking import LockingVerbs


class HistoryVerbs(LockingVerbs):
    """The verbs for the history of an instance."""

    @verb
    async def history(self, app: str) -> dict[str, Any]:
        """Return the revisions of an application, oldest first, and the number of the one that runs."""
        return history_of(self._core.state, app)

    @verb
    async def rollback(
        self,
        app: str,
        revision: int | None = None,
        by: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        progress_timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Deploy an earlier revision of an application again, as one change that is a new revision.

        Parameters
        ----------
        revision : int, optional
            Default: the last one that ran before the one that runs.
        request_id : str
            Tells the retry of a call from a second call.
        """
        request_id = request_id or self._goal_id()
        if timeout_s is None and progress_timeout_s is None:
            progress_timeout_s = settings.timeouts().change_s
        async with self._deciding([request_id]):
            decided = rollback_decisions.rollback(
                self._core.state,
                app,
                revision,
                goal_id=self._goal_id(),
                request_id=request_id,
                limits=ChangeLimits(timeout_s, progress_timeout_s),
                now=self._core.clock.wall(),
                by=by,
                unloadable=self._core.observed.unloadable.keys(),
            )
            await self._core.writer.commit(decided.change)
        self._core.loop.enqueue(self._core.state.apps.members(app))
        goal: GoalId | None = decided.goal
        return {
            "goal": goal,
            "rollback_of": decided.revision,
            "snapshot": None if goal is not None else await self._core.barrier(),
        }

    @verb
    async def events(
        self,
        after: int | None = None,
        application: str | None = None,
        limit: int = MAX_EVENTS,
        since_s: float | None = None,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Return events, oldest first, and the number after which the next call continues.

        Parameters
        ----------
        after : int, optional
            Only events with higher numbers, the oldest first if there are more than ``limit``. None: the
            newest.
        since_s : float, optional
            Only events of the last ``since_s`` seconds.
        wait_s : float
            How long to wait, at most 30 s, if there are none.
        """
        deadline = self._core.clock.now() + min(wait_s, MAX_WAIT_S)
        while True:
            added = self._core.history.added
            found = events_after(
                self._core.state,
                after,
                application=application,
                limit=limit,
                since_s=since_s,
                wall=self._core.clock.wall(),
            )
            left_s = deadline - self._core.clock.now()
            if found["events"] or left_s <= 0:
                return found
            after = found["next"]
            try:
                await self._core.clock.wait_for(added.wait(), left_s)
            except TimeoutError:
                return found
