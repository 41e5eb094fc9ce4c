"""Plots of simulations as SVG, which every browser shows.

The SVG is written directly, because this is the only plot: matplotlib 3.11 takes 174 MB with its dependencies
and 0.4 s to import, and altair 6.3 takes 21 MB and needs vl-convert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from daskserve.simulation.fleet import SimulationResult
from daskserve.simulation.report import resampled

COLOURS: Sequence[str] = ("#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#444444")
WIDTH, PANEL, GAP, LEFT, TOP = 900, 130, 34, 70, 40
#: Maximum number of points of a line. More points than pixels would only make the file larger.
MOST_POINTS = WIDTH - LEFT - 20


def plot(outcomes: Sequence[SimulationResult]) -> str:
    """Return an SVG of load, replicas, queue and wait over time, with one line per outcome."""
    first = outcomes[0]
    panels: list[tuple[str, list[Sequence[float]]]] = [
        ("requests/s", [first.trace.counts]),
        ("replicas", [each.history.running for each in outcomes]),
        ("queued", [each.history.queued for each in outcomes]),
        ("wait, s", [each.history.wait_s for each in outcomes]),
    ]
    height = TOP + len(panels) * (PANEL + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(outcomes),
    ]
    seconds = len(first.trace.counts)
    for number, (title, series) in enumerate(panels):
        parts += _panel(TOP + number * (PANEL + GAP), title, series, seconds)
    return "\n".join([*parts, "</svg>", ""])


def _legend(outcomes: Sequence[SimulationResult]) -> list[str]:
    parts, x = [], LEFT
    for number, outcome in enumerate(outcomes):
        text = f"{outcome.name}: {outcome.replica_hours:.1f} replica-hours"
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="14" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="20">{escape(text)}</text>')
        x += 30 + 7 * len(text)
    return parts


def _panel(top: int, title: str, series: Sequence[Sequence[float]], seconds: int) -> list[str]:
    limit = _nice(max((max(values, default=0.0) for values in series), default=0.0))
    bottom, right = top + PANEL, WIDTH - 20
    parts = [
        f'<text x="{LEFT}" y="{top - 5}" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{limit:g}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<path d="M{LEFT} {top}V{bottom}H{right}" fill="none" stroke="#999"/>',
    ]
    unit, name = (3600, "h") if seconds > 7200 else (60, "min") if seconds > 300 else (1, "s")
    for quarter in range(5):
        x = LEFT + (right - LEFT) * quarter / 4
        anchor = "end" if quarter == 4 else "middle"
        label = f"{seconds * quarter / 4 / unit:.3g} {name}"
        parts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="{anchor}" fill="#666">{label}</text>')
    for number, values in enumerate(series):
        shown = resampled(values, MOST_POINTS)
        points = _steps(shown, limit, top, right)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    return parts


def _steps(values: Sequence[float], limit: float, top: int, right: int) -> str:
    """Return a step-shaped path, with one step per change of the value."""
    parts: list[str] = []
    before = math.nan
    for number, value in enumerate(values):
        y = top + PANEL * (1 - value / limit)
        if y != before:
            x = LEFT + (right - LEFT) * number / max(1, len(values))
            parts.append(f"{'M' if not parts else 'H'}{x:.1f}{' ' if not parts else 'V'}{y:.1f}")
            before = y
    return "".join(parts) + f"H{right}"


def _nice(value: float) -> float:
    """Return the next larger round number, for the end of an axis."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next((step * scale for step in (1, 2, 2.5, 5, 10) if value <= step * scale * (1 + 1e-9)), value)
