"""The reasons for a backend's number of replicas.

See `daskserve.client.views.explanation`.
"""

from __future__ import annotations

from typing import Any

from daskserve.common.types import short_tag
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.observed.observed import Observed
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import autoscaling_of, current_bounds
from daskserve.control.views.messages import message_of


def explain(state: State, observed: Observed, name: str, now: float, wall: float) -> dict[str, Any]:
    """Return everything that determines the number of a backend's replicas.

    Raises
    ------
    NotFoundError
        There is no such backend or deployment.
    """
    backend = backend_decisions.find(state, name)
    tag = backend.tag
    config, bounds = autoscaling_of(backend), current_bounds(backend)
    decided = observed.scalings.get(tag)
    running = len(state.running(tag))
    samples = () if decided is None else decided.samples
    return {
        "name": short_tag(tag),
        "running": running,
        "wanted": backend.num_replicas,
        "min_replicas": None if bounds is None else bounds.least,
        "max_replicas": None if bounds is None else bounds.most,
        "policy": "" if config is None else _policy_name(config.policy),
        "group": "" if config is None else config.group or "",
        "policy_wants": None if decided is None else decided.wanted,
        "is_external": backend.is_scaled_externally,
        "is_dry_run": config is not None and config.dry_run,
        "reason": "" if decided is None else decided.reason,
        "samples": [
            {
                "ago_s": now - each.at,
                "ongoing": each.ongoing,
                "queued": each.queued,
                "rate": each.rate,
                "backlog": each.backlog,
            }
            for each in samples
        ],
        "events": [list(each) for each in backend.scalings],
        "target_capacity": backend.capacity,
        "target_capacity_direction": backend.capacity_direction,
        "waiting": message_of(observed, backend, state.replicas_of(backend.tag), wall),
    }


def _policy_name(policy: Any) -> str:
    return policy if isinstance(policy, str) else "a custom policy"
