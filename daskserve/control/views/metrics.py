"""The metrics of a controller and its instance.

Only the current state of a deployment is exported, without zeros for the other states: an instance may have
thousands of deployments.
"""

from __future__ import annotations

import re
from collections import Counter

from daskserve.common.types import ReplicaState
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import GoalState
from daskserve.control.records.state import State
from daskserve.control.views import actors as actor_views
from daskserve.control.views import backends as backend_views
from daskserve.control.views.applications import application_word
from daskserve.telemetry.histogram import LatencyHistogram
from daskserve.telemetry.table import MetricSample

#: Numbers in the autoscaler's reasons; in a label, each number would create a new series.
_NUMBER = re.compile(r"\d+(\.\d+)?")
MAX_REASON = 80


class ControlMetrics:
    """The counts of one controller."""

    def __init__(self) -> None:
        self.rounds = LatencyHistogram()
        #: The duration of the last round; 0 before the first one.
        self.last_round_s = 0.0
        self.failures = 0
        #: Number of replica moves to better workers that were begun.
        self.moves = 0
        #: Number of ended goals, by outcome.
        self.goals: Counter[GoalState] = Counter()
        self.started_at = 0.0

    def observe_round(self, took_s: float) -> None:
        """Count one round of the control loop."""
        self.rounds.observe(took_s)
        self.last_round_s = took_s

    def counts(self, instance: str) -> list[MetricSample]:
        """Return the counters."""
        me = (instance,)
        return [
            ("control_loop_duration_seconds", me, self.rounds),
            ("control_loop_failures", me, self.failures),
            ("replica_moves", me, self.moves),
            ("goals", (*me, "done"), self.goals[GoalState.DONE]),
            ("goals", (*me, "failed"), self.goals[GoalState.FAILED]),
        ]

    def states(self, instance: str, epoch: int, state: State, observed: Observed) -> list[MetricSample]:
        """Return the gauges of this controller, its deployments and its proxies."""
        me = (instance,)
        pending = sum(goal.state is GoalState.PENDING for goal in list(state.goals.values()))
        found: list[MetricSample] = [
            ("controller_epoch", me, epoch),
            ("controller_start_time_seconds", me, self.started_at),
            ("goals_pending", me, pending),
        ]
        found += _deployments(instance, state, observed)
        found += _applications(instance, state, observed)
        found += _proxies(instance, state, observed)
        found += _workers(instance, observed)
        for tag, decided in list(observed.scalings.items()):
            found.append(("autoscaling_wanted_replicas", (instance, tag), decided.wanted))
            found.append(("autoscaling_reason", (instance, tag, bounded(decided.reason)), 1))
        return found


def bounded(reason: str) -> str:
    """Return a reason without its numbers, which differ between decisions."""
    return _NUMBER.sub("N", reason)[:MAX_REASON]


def _deployments(instance: str, state: State, observed: Observed) -> list[MetricSample]:
    found: list[MetricSample] = []
    by_state = Counter((each.backend, each.state) for each in list(state.replicas.values()))
    for tag, backend in list(state.backends.items()):
        labels = (instance, tag)
        running = by_state.pop((tag, ReplicaState.RUNNING), 0)
        found += [
            ("deployment_wanted_replicas", labels, backend.num_replicas),
            ("deployment_replicas", (*labels, ReplicaState.RUNNING.value), running),
            ("deployment_status", (*labels, backend_views.status_word(observed, backend, running)), 1),
        ]
    for (tag, replica_state), count in by_state.items():
        found.append(("deployment_replicas", (instance, tag, replica_state.value), count))
    return found


def _applications(instance: str, state: State, observed: Observed) -> list[MetricSample]:
    return [
        ("application_status", (instance, app.name, application_word(state, observed, app)), 1)
        for app in list(state.apps)
    ]


def _proxies(instance: str, state: State, observed: Observed) -> list[MetricSample]:
    return [
        ("proxy_status", (instance, proxy.tag, actor_views.proxy_state(proxy, observed)), 1)
        for proxy in list(state.proxies.values())
    ]


def _workers(instance: str, observed: Observed) -> list[MetricSample]:
    words = Counter(dict.fromkeys(("usable", "retiring", "unresponsive"), 0))
    for address, info in list(observed.workers.items()):
        is_hung = address in observed.unresponsive
        words["unresponsive" if is_hung else "retiring" if info.is_retiring else "usable"] += 1
    return [("workers", (instance, word), count) for word, count in words.items()]
