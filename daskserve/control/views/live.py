"""The live metrics of an instance as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.common.types import BackendTag, EndpointTag, ReplicaState
from daskserve.control.observed.observed import Observed
from daskserve.control.records.state import State


def live_metrics(state: State, observed: Observed, now: float, wall: float) -> dict[str, Any]:
    """Return the metrics of all deployments, replicas, calls between deployments, and HTTP."""
    live = observed.live
    running = {tag: [each.tag for each in state.running(tag)] for tag in state.backends}
    return {
        "time": wall,
        "deployments": {tag: live.of_deployment(tag, replicas, now) for tag, replicas in running.items()},
        "replicas": {
            replica: {
                "deployment": tag,
                "worker": state.replicas[replica].worker,
                **live.of_replica(replica, now),
                "multiplexed": observed.multiplexed.of(replica),
            }
            for tag, replicas in running.items()
            for replica in replicas
        },
        "calls": live.calls(lambda endpoint: _targets(state, endpoint), now),
        "http": live.of_http([each.tag for each in state.proxies.values()], now),
    }


def is_measured(state: State, observed: Observed, now: float) -> bool:
    """Return whether the rates of all running replicas and all proxies are known."""
    replicas = [each.tag for each in state.replicas.values() if each.state is ReplicaState.RUNNING]
    proxies = [each.tag for each in state.proxies.values() if not each.is_leaving]
    return observed.live.is_measured(replicas, proxies, now)


def _targets(state: State, endpoint: EndpointTag) -> Mapping[BackendTag, float]:
    """Return the share of each backend of an endpoint's traffic."""
    record = state.endpoints.get(endpoint)
    if record is None:
        return {endpoint: 1.0} if endpoint in state.backends else {}
    total = sum(record.traffic.values())
    return {tag: weight / total for tag, weight in record.traffic.items() if weight > 0}
