"""The health of a controller as plain values."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil

from daskserve.autoscaling.latency import quantile_of
from daskserve.control.records.state import State
from daskserve.control.views.metrics import ControlMetrics


def controller_health(metrics: ControlMetrics, state: State, wall: float) -> dict[str, Any]:
    """Return the metrics of a controller's loop and process; call this on the event loop."""
    rounds = metrics.rounds
    count = rounds.count
    longest = rounds.bounds[-1]
    return {
        "uptime_s": round(max(0.0, wall - metrics.started_at), 3) if metrics.started_at else None,
        "num_control_loops": count,
        "num_control_loop_failures": metrics.failures,
        "last_control_loop_duration_s": round(metrics.last_round_s, 6),
        "mean_control_loop_duration_s": round(rounds.sum / count, 6) if count else None,
        "p99_control_loop_duration_s": (
            round(min(quantile_of(rounds.counts, rounds.bounds, 0.99), longest), 6) if count else None
        ),
        "num_asyncio_tasks": len(asyncio.all_tasks()),
        "process_memory_mb": round(psutil.Process().memory_info().rss / 2**20, 1),
        "num_replicas": len(state.replicas),
        "num_deployments": len(state.backends),
    }
