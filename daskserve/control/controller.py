"""The controller: the verbs of an instance.

Every verb that changes something takes the lock, calls a pure function for the change, writes it to the store
as one transaction, applies it, notifies the listeners, and wakes the loop. The effect of a successful verb
therefore survives any crash. A failed verb can be retried, because every verb is idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import ActorContext, verb, verbs_of
from daskserve.common.formatting import shown
from daskserve.common.types import GoalId
from daskserve.control.core import MAX_WAIT_S, ControllerCore
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions.rollout_plan import serves_rollout
from daskserve.control.proxies.take_over import listens
from daskserve.control.records.records import GoalRecord, GoalState
from daskserve.control.records.storing import checkpoint
from daskserve.control.rpc.changing import ChangingVerbs
from daskserve.control.rpc.declaring import DeclaringVerbs
from daskserve.control.rpc.draining import DrainingVerbs
from daskserve.control.rpc.history import HistoryVerbs
from daskserve.control.rpc.inspecting import InspectingVerbs
from daskserve.control.rpc.live import LiveVerbs
from daskserve.control.rpc.logs import LogVerbs
from daskserve.control.rpc.models import ModelVerbs
from daskserve.control.rpc.overview import OverviewVerbs
from daskserve.control.rpc.rollouts import RolloutVerbs
from daskserve.control.rpc.watching import WatchedStatus
from daskserve.control.views import actors as actor_views
from daskserve.control.views import applications as app_views
from daskserve.control.views import backends as backend_views
from daskserve.control.views import details as details_view
from daskserve.control.views import explanation as explaining
from daskserve.control.views import introspection
from daskserve.control.views.builds import with_builds
from daskserve.control.views.deployments import stored_application, stored_deployments
from daskserve.control.views.health import controller_health
from daskserve.errors import DeployError, NotFoundError, RequestTimeoutError
from daskserve.options.start_messages import dump_http
from daskserve.payload.packed_errors import load_error
from daskserve.telemetry.table import MetricSample

#: Interval of the checks in `Controller.wait_for_http`, which runs once, at the start of an instance.
HTTP_POLL_S = 0.005
#: How long `ReadingVerbs.health` sleeps.
HEALTH_SLEEP_S = 0.02


class Controller:
    """The controller of one instance. ``context.spec.incarnation`` is its epoch."""

    def __init__(self, context: ActorContext) -> None:
        self._core = ControllerCore(context)
        kinds = (
            ChangingVerbs,
            RolloutVerbs,
            DeclaringVerbs,
            ReadingVerbs,
            HistoryVerbs,
            LiveVerbs,
            ModelVerbs,
            DrainingVerbs,
            LogVerbs,
            OverviewVerbs,
            InspectingVerbs,
        )
        self.verbs = verbs_of(*(kind(self._core) for kind in kinds))

    async def start(self) -> dict[str, Any]:
        """Load the state from the store and start the reconcile loop."""
        return await self._core.start()

    async def stop(self, grace_s: float) -> None:
        """Stop the loop. The actors keep running; their Hosts stop them."""
        await self._core.stop(grace_s)

    def samples(self) -> list[MetricSample]:
        """Return the metric samples; see `daskserve.telemetry.table.Source`."""
        return self._core.samples()


class ReadingVerbs:
    """The verbs that read the state, wait for changes, and take reports."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._watched = WatchedStatus(core.clock, self.status)

    # Verbs: waiting and looking

    @verb
    async def wait_for_goal(
        self, goal_id: GoalId, timeout_s: float, until_served: bool = False
    ) -> dict[str, Any]:
        """Wait until a goal is done, for at most ``timeout_s`` (capped at 30 s).

        On timeout, ``is_done`` is False.

        With ``until_served``, also return once the goal's rollout gets the traffic of its first step.

        A goal that was superseded is done; the answer has its error and its successor.

        Raises
        ------
        ServeError
            The reason why the goal failed.
        """
        deadline = self._core.clock.now() + min(timeout_s, MAX_WAIT_S)
        while True:
            ended = self._core.goal_ended
            goal = self._core.state.goals.get(goal_id)
            if goal is None:
                raise NotFoundError(f"Goal {goal_id} does not exist, or ended long ago.")
            if goal.state is GoalState.FAILED:
                error = load_error(goal.error) if goal.error else DeployError("The change failed.")
                raise error
            is_served = until_served and serves_rollout(self._core.state, goal)
            if goal.state is GoalState.DONE or is_served:
                return {
                    "is_done": True,
                    "snapshot": await self._core.barrier(),
                    "error": goal.error,
                    "successor": goal.successor,
                }
            try:
                await self._core.clock.wait_for(ended.wait(), max(0.0, deadline - self._core.clock.now()))
            except TimeoutError:
                return {"is_done": False, "why": self._why(goal)}

    def _why(self, goal: GoalRecord) -> str | None:
        """Return the reason why replicas of a goal's backends wait."""
        app = self._core.state.apps.get(goal.application)
        tags = (goal.backend,) if app is None else app.tags
        return self._core.observed.why_waiting(tags)

    @verb
    async def wait_for_http(self, timeout_s: float) -> dict[str, Any]:
        """Wait until every target proxy listens and this instance owns the store.

        Raises
        ------
        ServeError
            The error of a proxy that cannot listen, or another cluster has taken over the store.
        """
        deadline = self._core.clock.now() + timeout_s
        while True:
            trial = self._core.trial
            if trial.error is not None:
                raise trial.error
            has_proxies = self._core.http.has_proxies
            if trial.is_over and (not has_proxies or listens(self._core.state, self._core.observed)):
                return {"urls": self._urls()}
            for proxy in self._core.state.proxies.values() if has_proxies else ():
                if not proxy.is_leaving and proxy.name in self._core.observed.proxies_failed:
                    raise self._core.observed.proxies_failed[proxy.name]
            if self._core.clock.now() >= deadline:
                why = trial.waits_for or "the HTTP proxies do not listen"
                raise RequestTimeoutError(f"The instance did not serve within {shown(timeout_s)} s: {why}.")
            await self._core.clock.sleep(HTTP_POLL_S)

    @verb
    async def next_worker(self) -> str | None:
        """Return the worker that would get a replica with default options; None if no worker has room."""
        return self._core.loop.next_worker()

    @verb
    async def http_urls(self) -> list[str]:
        return self._urls()

    def _urls(self) -> list[str]:
        return actor_views.http_urls(self._core.state, self._core.observed)

    @verb
    async def status(self) -> dict[str, Any]:
        """Return the instance's status as plain values for `daskserve.client.views.status.Status`."""
        state, observed = self._core.state, self._core.observed
        wall = self._core.clock.wall()
        return {
            "instance": self._core.cluster.instance,
            "epoch": self._core.epoch,
            "owns_store": self._core.cluster.store.ownership.is_ours,
            "actors": actor_views.actors(state, observed, self._core.cluster.instance, self._core.process),
            "backends": {
                tag: backend_views.backend_status(state, observed, each, wall)
                for tag, each in state.backends.items()
            },
            "applications": with_builds(
                state,
                {app.name: app_views.application_status(state, observed, app, wall) for app in state.apps},
                self._core.building.waiting,
            ),
            "endpoints": {name: backend_decisions.get_endpoint(state, name) for name in state.endpoints},
            "goals": introspection.goals(state),
            "http_urls": self._urls(),
            "target_capacity": state.capacity.percent,
            "target_capacity_direction": state.capacity.direction,
            "unresponsive_workers": sorted(observed.unresponsive),
            "broken_routes": actor_views.broken_routes(
                observed, self._core.worker, self._core.cluster.routes.broken()
            ),
            "refused_workers": dict(await self._core.cluster.refused_workers()),
            "problems": self._core.problems(),
        }

    @verb
    async def next_status(self, seen: str, timeout_s: float) -> dict[str, Any]:
        """Return the status once its id is not ``seen``; return without it after the timeout."""
        core = self._core
        deadline = core.clock.now() + min(timeout_s, MAX_WAIT_S)
        return await self._watched.next(core.writer, seen, deadline)

    @verb
    async def health(self) -> dict[str, Any]:
        """Return the controller's identity, the delay of its event loop, and the metrics of its rounds."""
        clock = self._core.clock
        due = clock.now() + HEALTH_SLEEP_S
        await clock.sleep(HEALTH_SLEEP_S)
        return {
            "epoch": self._core.epoch,
            **self._core.process,
            "owns_store": self._core.cluster.store.ownership.is_ours,
            "event_loop_delay_s": round(max(0.0, clock.now() - due), 6),
            **controller_health(self._core.loop.metrics, self._core.state, clock.wall()),
        }

    @verb
    async def details(self, name: str | None = None, api_type: str | None = None) -> dict[str, Any]:
        """Return the status in Ray Serve's format, with the version of the declared configuration."""
        core = self._core
        found = details_view.details(
            core.state,
            core.observed,
            core.http,
            instance=core.cluster.instance,
            controller=core.worker,
            waiting=core.building.waiting,
            wall=core.clock.wall(),
            application=name,
            api_type=api_type,
        )
        return {"version": core.state.declared.last.number, "details": found}

    @verb
    async def explain(self, name: str) -> dict[str, Any]:
        return explaining.explain(
            self._core.state, self._core.observed, name, self._core.clock.now(), self._core.clock.wall()
        )

    @verb
    async def view(self, name: str) -> Any:
        """Return one of `daskserve.control.views.introspection.VIEWS`, or ``get_http_config``."""
        if name == "get_http_config":
            return {**dump_http(self._core.http), "ssl_keyfile_password": None}
        if name not in introspection.VIEWS:
            raise NotFoundError(
                f"There is no view {name!r}; known: {', '.join(sorted(introspection.VIEWS))}."
            )
        return introspection.VIEWS[name](self._core.state, self._core.observed)

    @verb
    async def report_queue_lengths(self, router: str, lengths: Mapping[str, int]) -> None:
        """Record a router's queue lengths by backend; the view ``queue_lengths`` shows them."""
        await self.report_load(router, {tag: (waiting, 0) for tag, waiting in lengths.items()})

    @verb
    async def report_load(
        self,
        router: str,
        loads: Mapping[str, Sequence[int]],
        versions: Mapping[str, Mapping[str, Any]] | None = None,
        live: Mapping[str, Any] | None = None,
        troubles: Mapping[str, str] | None = None,
    ) -> None:
        """Record a router's queued requests and requests in flight, by backend.

        ``versions`` are its counts for both versions of rollouts. ``live`` contains its counts of all calls,
        while a client reads live metrics. ``troubles`` contains the errors of the users' request routers.
        """
        going_on = {
            tag: each
            for tag, each in (versions or {}).items()
            if (backend := self._core.state.backends.get(tag)) is not None and backend.canary is not None
        }
        self._core.observed.rollouts.report(router, going_on)
        if live is not None:
            self._core.observed.live.router(router, live, self._core.clock.now())
        self._core.observed.loads.report(router, loads, self._core.clock.now())
        self._core.scaler.notify_load(tag for tag, load in loads.items() if any(load))
        await self._note_router_errors(router, troubles or {})

    async def _note_router_errors(self, router: str, troubles: Mapping[str, str]) -> None:
        core = self._core
        known = {tag: text for tag, text in troubles.items() if tag in core.state.backends}
        new = core.observed.router_errors.report(router, known, core.clock.wall())
        if new:
            async with core.writer:
                await core.writer.note(core.history.of_routers({tag: known[tag] for tag in new}))

    @verb
    async def note_loading(self, replicas: Sequence[str]) -> None:
        """Query replicas that are about to load multiplexed models, until they have loaded them."""
        self._core.observed.multiplexed.on_loading(replicas)

    @verb
    async def get_deployment_info(self, name: str) -> dict[str, Any]:
        return introspection.deployment_info(self._core.state, name)

    @verb
    async def stored_deployments(self, name: str | None = None) -> dict[str, Any]:
        return stored_deployments(self._core.state, name)

    @verb
    async def stored_application(self, name: str) -> dict[str, Any]:
        return stored_application(self._core.state, name)

    @verb
    async def snapshot(self) -> dict[str, Any]:
        return introspection.snapshot(self._core.state, self._core.cluster.instance)

    @verb
    async def hand_over(self) -> dict[str, Any]:
        """Return what a new scheduler needs to restore the instance."""
        return {
            "workers": sorted(self._core.observed.workers),
            "epoch": self._core.epoch,
            "records": checkpoint.encoded(self._core.state.records()),
            "is_trial": not self._core.trial.is_over,
        }

    @verb
    async def ping(self, store: Mapping[str, Any] | None = None) -> int:
        """Record the store's condition and return the epoch; an answer shows that the event loop runs."""
        if store is not None:
            self._core.learn_of_store(store)
        return self._core.epoch

    @verb
    async def fetch(self, keys: Sequence[str]) -> dict[str, Any]:
        return self._core.long_poll.fetch(keys)

    @verb
    async def listen_for_change(self, snapshot_ids: Mapping[str, Any]) -> dict[str, Any]:
        return await self._core.long_poll.listen_for_change(snapshot_ids)
