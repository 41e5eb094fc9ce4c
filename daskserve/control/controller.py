"""The controller: the verbs of an instance. Wiring only; what a verb does is in the pure modules.

Every verb that changes something takes the lock, lets a pure function make the change, writes it to the
store as one transaction, applies it, tells the listeners, and wakes the loop. A verb that succeeded
therefore holds whatever dies next; one that failed may be repeated, because every verb is idempotent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.cluster.base import verb
from daskserve.control import backend_verbs, explaining, views
from daskserve.control.changes import ChangingVerbs
from daskserve.control.core import MAX_WAIT_S
from daskserve.control.records import GoalState
from daskserve.errors import DeployError, NotFoundError, RequestTimeoutError
from daskserve.payload import load_error
from daskserve.starts import dump_http
from daskserve.types import GoalId

#: How often `Controller.wait_for_http` looks; it runs once, at the start of an instance.
HTTP_POLL_S = 0.005


class Controller(ChangingVerbs):
    """One per instance. ``context.spec.incarnation`` is its epoch."""

    # Verbs: waiting and looking

    @verb
    async def wait_for_goal(self, goal_id: GoalId, timeout_s: float) -> dict[str, Any]:
        """Answer when a goal ended, or after ``timeout_s`` (at most 30 s) with ``is_done`` False.

        Raises
        ------
        ServeError
            Why the goal failed.
        """
        deadline = self._clock.now() + min(timeout_s, MAX_WAIT_S)
        while True:
            ended = self._goal_ended
            goal = self._state.goals.get(goal_id)
            if goal is None:
                raise NotFoundError(f"Goal {goal_id} does not exist, or ended long ago.")
            if goal.state is GoalState.FAILED:
                error = load_error(goal.error) if goal.error else DeployError("The change failed.")
                raise error
            if goal.state is GoalState.DONE:
                return {"is_done": True, "snapshot": await self._barrier()}
            try:
                await self._clock.wait_for(ended.wait(), max(0.0, deadline - self._clock.now()))
            except TimeoutError:
                return {"is_done": False, "why": self._observed.waiting.get(goal.backend)}

    @verb
    async def wait_for_http(self, timeout_s: float) -> dict[str, Any]:
        """Answer when every wanted proxy listens; raise what keeps one from it."""
        deadline = self._clock.now() + timeout_s
        while True:
            proxies = list(self._state.proxies.values())
            if not self._http.has_proxies:
                return {"urls": []}
            if proxies and all(proxy.name in self._observed.proxies_ready for proxy in proxies):
                return {"urls": self._urls()}
            for proxy in proxies:
                if proxy.name in self._observed.proxies_failed:
                    raise self._observed.proxies_failed[proxy.name]
            if self._clock.now() >= deadline:
                raise RequestTimeoutError(f"HTTP proxies not available after {timeout_s:g}s.")
            await self._clock.sleep(HTTP_POLL_S)

    @verb
    async def http_urls(self) -> list[str]:
        return self._urls()

    def _urls(self) -> list[str]:
        ready = self._observed.proxies_ready
        urls = [url for name in sorted(ready) for url in ready[name]["urls"]]
        return list(dict.fromkeys(urls))

    @verb
    async def status(self) -> dict[str, Any]:
        """Return the instance in plain values; `daskserve.client.status.Status` is what users see of it."""
        state, observed = self._state, self._observed
        controller = {"worker": self._worker, "pid": os.getpid()}
        return {
            "instance": self._cluster.instance,
            "epoch": self._epoch,
            "actors": views.actors(state, observed, self._cluster.instance, controller),
            "backends": {
                tag: views.backend_status(state, observed, each) for tag, each in state.backends.items()
            },
            "endpoints": {name: backend_verbs.get_endpoint(state, name) for name in state.endpoints},
            "goals": views.goals(state),
            "http_urls": self._urls(),
            "target_capacity": state.capacity.percent,
            "target_capacity_direction": state.capacity.direction,
            "unresponsive_workers": sorted(observed.unresponsive),
            "refused_workers": dict(await self._cluster.refused_workers()),
            "problems": {
                **self._cluster.store.problems(),
                **{key: str(error) for key, error in self._corrupt.items()},
            },
        }

    @verb
    async def explain(self, name: str) -> dict[str, Any]:
        return explaining.explain(self._state, self._observed, name, self._clock.now())

    @verb
    async def view(self, name: str) -> Any:
        """Return one of `daskserve.control.views.VIEWS`, or ``get_http_config``."""
        if name == "get_http_config":
            return {**dump_http(self._http), "ssl_keyfile_password": None}
        if name not in views.VIEWS:
            raise NotFoundError(f"There is no view {name!r}; known: {', '.join(sorted(views.VIEWS))}.")
        return views.VIEWS[name](self._state, self._observed)

    @verb
    async def report_queue_lengths(self, router: str, lengths: Mapping[str, int]) -> None:
        """Take note of what waits in a router, by backend; the view ``queue_lengths`` tells all of them."""
        await self.report_load(router, {tag: (waiting, 0) for tag, waiting in lengths.items()})

    @verb
    async def report_load(self, router: str, loads: Mapping[str, Sequence[int]]) -> None:
        """Take note of how many requests wait in a router and how many are in flight, by backend."""
        self._observed.loads.report(router, loads, self._clock.now())
        self._scaler.notify_load(tag for tag, load in loads.items() if any(load))

    @verb
    async def get_deployment_info(self, name: str) -> dict[str, Any]:
        return views.deployment_info(self._state, name)

    @verb
    async def snapshot(self) -> dict[str, Any]:
        return views.snapshot(self._state, self._cluster.instance)

    @verb
    async def ping(self) -> int:
        """Answer with the epoch, which shows that this process and its loop run."""
        return self._epoch

    @verb
    async def fetch(self, keys: Sequence[str]) -> dict[str, Any]:
        return self._news.fetch(keys)

    @verb
    async def listen_for_change(self, snapshot_ids: Mapping[str, Any]) -> dict[str, Any]:
        return await self._news.listen_for_change(snapshot_ids)
