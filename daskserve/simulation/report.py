"""Present the results of simulations as text and as JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.simulation.fleet import SimulationResult

BARS = " ▁▂▃▄▅▆▇█"
#: Width of a sparkline, in characters.
WIDTH = 72
#: Maximum number of changes that are listed with their reasons.
MOST_CHANGES = 12


def as_dict(outcome: SimulationResult, price: float = 0.0) -> dict[str, Any]:
    """Return an outcome as plain values for JSON."""
    history, request_counts = outcome.history, outcome.queue.request_counts
    return {
        "policy": outcome.name,
        "requests": round(outcome.trace.requests, 3),
        "completed": round(request_counts.completed, 3),
        "rejected": round(request_counts.rejected, 3),
        "expired": round(request_counts.expired, 3),
        "wait_p50_s": outcome.wait_quantile_s(0.5),
        "wait_p99_s": outcome.wait_quantile_s(0.99),
        "latency_p50_s": outcome.latency_quantile_s(0.5),
        "latency_p99_s": outcome.latency_quantile_s(0.99),
        "most_queued": max(history.queued, default=0.0),
        "most_replicas": int(max(history.running, default=0)),
        "mean_replicas": round(math.fsum(history.running) / max(1, len(history.running)), 3),
        "replica_hours": round(outcome.replica_hours, 4),
        "cost": round(outcome.replica_hours * price, 4),
        "changes": [
            {"at_s": each.at, "before": each.before, "after": each.after, "reason": each.reason}
            for each in history.changes
        ],
    }


COLUMNS: Mapping[str, str] = {
    "policy": "policy",
    "completed": "completed",
    "rejected": "refused",
    "expired": "expired",
    "wait_p50_s": "wait p50",
    "wait_p99_s": "wait p99",
    "latency_p99_s": "latency p99",
    "most_queued": "most queued",
    "most_replicas": "most replicas",
    "replica_hours": "replica-hours",
    "cost": "cost",
}


def table(outcomes: Sequence[SimulationResult], price: float = 0.0) -> str:
    """Return one line per outcome, in columns."""
    rows = [[*COLUMNS.values(), "changes"]]
    for outcome in outcomes:
        found = as_dict(outcome, price)
        rows.append([_text(name, found[name]) for name in COLUMNS] + [str(len(found["changes"]))])
    if price <= 0:
        place = list(COLUMNS).index("cost")
        rows = [row[:place] + row[place + 1 :] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_s"):
        return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"
    if name in ("replica_hours", "cost"):
        return f"{value:,.2f}"
    return f"{value:,.0f}"


def resampled(values: Sequence[float], width: int) -> list[float]:
    """Return the maxima of ``width`` equal parts of the values, so that peaks stay visible."""
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    return [max(values[low:high]) for low, high in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return a sparkline of the values, in which anything above 0 is visible."""
    shown = resampled(values, width)
    top = max(shown, default=0.0)
    if top <= 0:
        return " " * len(shown)
    steps = len(BARS) - 1
    return "".join(BARS[math.ceil(value / top * steps - 1e-9)] for value in shown)


def picture(outcome: SimulationResult) -> str:
    """Return sparklines of load, replicas, queue and wait over time."""
    history = outcome.history
    rows = [
        ("requests/s", outcome.trace.counts, ""),
        ("replicas", history.running, ""),
        ("queued", history.queued, ""),
        ("wait", history.wait_s, " s"),
    ]
    lines = [f"{outcome.name}, {_span(len(history.running))}"]
    for name, values, unit in rows:
        top = max(values, default=0.0)
        peak = f"{top:,.2f}" if unit else f"{top:,.0f}"
        lines.append(f"{name:>10} |{sparkline(values)}| {peak}{unit}")
    return "\n".join(lines)


def _span(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{value} {unit}" for value, unit in ((hours, "h"), (minutes, "min"), (left, "s")) if value]
    return " ".join(parts) or "0 s"


def changes(outcome: SimulationResult, most: int = MOST_CHANGES) -> str:
    """Return the first changes with their reasons, one per line."""
    found = outcome.history.changes
    lines = [f"{each.at:>9,.0f} s  {each.before} to {each.after}: {each.reason}" for each in found[:most]]
    if len(found) > most:
        lines.append(f"{'':>11}  and {len(found) - most} more")
    return "\n".join(lines)
