"""Draw panels of dashboards as SVG from the answers of Prometheus, in Grafana's layout."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from grafana.panels import (
    GRID_COLUMNS,
    Dashboard,
    GridPosition,
    Panel,
    PanelKind,
    Row,
    Unit,
    placed,
)

COLUMN, UNIT, GAP = 40, 24, 8
WIDTH = GRID_COLUMNS * COLUMN
COLOURS: Sequence[str] = (
    "#3a7d44 #d9a404 #2f6fb3 #d1495b #7d5ba6 #e07a1f #17898f #8c5a3c #6b7280 #b5179e #84a98c #3d405b".split()
)
TEXT, FAINT, GRID, BORDER = "#1f2933", "#6b7280", "#e5e7eb", "#d4d8de"
LIMITS = ("#d9a404", "#d1495b")
#: Maximum number of lines of a legend, and of characters of a name.
LEGEND_LINES, NAME_LENGTH = 3, 40
#: If there are more series than this, those that are always 0 are not drawn.
FEW = 5
#: Approximate width of a character in a legend.
CHARACTER = 5.0
REST_WIDTH = 50


@dataclass(frozen=True)
class Series:
    """One series: its name, its labels, and points of ``(seconds since the start, value)``."""

    name: str
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


#: The series of each panel, by its title.
Results = Mapping[str, Sequence[Series]]


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return a series' name from its legend, as Grafana does."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


# ---- values


def _scaled(value: float, steps: Sequence[tuple[float, str]]) -> str:
    size, unit = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / size:.3g}{unit}"


def formatted(value: float, unit: Unit) -> str:
    """Return a value with its unit."""
    if value == 0:
        return {Unit.RATIO: "0%", Unit.SECONDS: "0 s", Unit.BYTES: "0 B"}.get(unit, "0")
    if unit is Unit.SECONDS:
        return _scaled(value, [(3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs")])
    if unit is Unit.RATIO:
        return f"{100 * value:.3g}%"
    if unit in (Unit.BYTES, Unit.BYTES_PER_S):
        ending = "/s" if unit is Unit.BYTES_PER_S else ""
        steps = [(1 << 30, " GiB"), (1 << 20, " MiB"), (1 << 10, " KiB"), (1, " B")]
        return _scaled(value, steps) + ending
    ending = {Unit.REQUESTS_PER_S: " req/s", Unit.PER_S: "/s"}.get(unit, "")
    return (
        _scaled(value, [(1e6, " M"), (1e3, " K"), (1, "")]) if abs(value) >= 1 else f"{value:.2g}"
    ) + ending


def ticks(largest: float, unit: Unit) -> list[float]:
    """Return round values from 0 up to at least the largest value."""
    if not math.isfinite(largest) or largest <= 0:
        largest = 1.0
    whole = 60.0 if unit is Unit.SECONDS and largest > 60 else 1.0
    base = 1024.0 if unit in (Unit.BYTES, Unit.BYTES_PER_S) else 0.0
    whole = base ** math.floor(math.log(largest, base)) if base and largest > 1 else whole
    step = _round(largest / whole / 4) * whole
    if unit is Unit.NUMBER and 1 <= largest <= 4:
        step = max(step, 1.0)  # most plain numbers are whole
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def _round(value: float) -> float:
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 2.5, 5, 10) if value <= step * scale * (1 + 1e-9))


# ---- pieces of SVG


def _text(x: float, y: float, text: str, *, size: float = 10, anchor: str = "start", **more: str) -> str:
    given = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    placed_at = f'x="{x:.0f}" y="{y:.0f}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text {placed_at} font-size="{size:g}"{given}>{escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, **more: str) -> str:
    given = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    steps = "".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))
    return f'<path d="{steps}" fill="none" stroke="{colour}"{given}/>'


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True)
class Frame:
    """The position of a chart and the values at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    seconds: float
    largest: float

    def x(self, at: float) -> float:
        return self.left + (self.right - self.left) * at / self.seconds

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / self.largest


def screen(dashboard: Dashboard, row: Row, results: Results, seconds: float) -> str:
    """Return the drawing of one row of a dashboard."""
    places = [(each, place) for each, place in placed(dashboard) if each in row.panels]
    first = min(place.y for _, place in places)
    height = max(place.y + place.height for _, place in places) - first
    pixels = 30 + height * UNIT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{pixels}" '
        f'viewBox="0 0 {WIDTH} {pixels}" font-family="Inter, Helvetica, Arial, sans-serif" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{pixels}" fill="#f4f5f7"/>',
        _text(GAP, 20, f"{dashboard.title} › {row.title}", size=13, font_weight="600"),
    ]
    for panel, place in places:
        assert isinstance(panel, Panel)
        at = GridPosition(
            place.x * COLUMN, 30 + (place.y - first) * UNIT, place.width * COLUMN, place.height * UNIT
        )
        parts += _panel(panel, at, results.get(panel.title, ()), seconds)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, place: GridPosition, series: Sequence[Series], seconds: float) -> list[str]:
    x, y = place.x + GAP / 2, place.y
    width, height = place.width - GAP, place.height - GAP
    draw = {
        PanelKind.TIME_SERIES: _chart,
        PanelKind.STAT: _stat,
        PanelKind.TABLE: _table,
        PanelKind.HEATMAP: _heatmap,
    }[panel.kind]
    return [
        f"<g><title>{escape(panel.description)}</title>",
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="white" stroke="{BORDER}"/>',
        _text(x + 8, y + 16, panel.title, size=11, font_weight="600"),
        *(
            draw(panel, GridPosition(int(x), y, width, height), series, seconds)
            if series
            else [_text(x + width / 2, y + height / 2, "No data", anchor="middle", fill=FAINT)]
        ),
        "</g>",
    ]


# ---- charts


def _chart(panel: Panel, place: GridPosition, series: Sequence[Series], seconds: float) -> list[str]:
    series, quiet = _worth_drawing(series)
    names = [each.name for each in series]
    lines = _legend(place, names, quiet)
    stacks = _stacked(series) if panel.is_stacked else [each.points for each in series]
    largest = max((value for points in stacks for _, value in points if math.isfinite(value)), default=0.0)
    values = ticks(largest, panel.unit)
    bottom = place.y + place.height - 22 - 12 * len(lines)
    frame = Frame(place.x + 58, place.y + 28, place.x + place.width - 10, bottom, seconds, values[-1])
    parts = _axes(frame, values, panel.unit)
    order = list(enumerate(stacks))
    for number, points in reversed(order) if panel.is_stacked else order:
        parts += _curve(frame, points, COLOURS[number % len(COLOURS)], panel.is_stacked)
    for limit, colour in zip((panel.warns_at, panel.alarms_at), LIMITS, strict=True):
        if limit is not None and limit <= frame.largest:
            ends = [(frame.left, frame.y(limit)), (frame.right, frame.y(limit))]
            parts.append(_line(ends, colour, stroke_dasharray="4 3", stroke_width="0.8"))
    for number, line in enumerate(lines):
        y = place.y + place.height - 6 - 12 * (len(lines) - 1 - number)
        for x, name, index in line:
            if index >= 0:
                colour = COLOURS[index % len(COLOURS)]
                parts.append(f'<rect x="{x:.0f}" y="{y - 5}" width="10" height="3" fill="{colour}"/>')
            parts.append(_text(x + 13, y, name, size=9, fill=FAINT))
    return parts


def _worth_drawing(series: Sequence[Series]) -> tuple[Sequence[Series], int]:
    """Return the series to draw, and how many were left out; of many series, those always 0 are."""
    moving = [each for each in series if any(value > 0 for _, value in each.points)]
    if len(series) <= FEW or not moving:
        return series, 0
    return moving, len(series) - len(moving)


def _axes(frame: Frame, values: Sequence[float], unit: Unit) -> list[str]:
    parts = []
    for value in values:
        y = frame.y(value)
        parts.append(_line([(frame.left, y), (frame.right, y)], GRID))
        parts.append(_text(frame.left - 5, y + 3, formatted(value, unit), size=9, anchor="end", fill=FAINT))
    step = next(each for each in (10, 30, 60, 120, 300, 600, 3600) if frame.seconds / each <= 5)
    for number in range(int(frame.seconds / step) + 1):
        at = number * step
        label = f"{int(at // 60)}:{int(at % 60):02}"
        anchor = "end" if frame.right - frame.x(at) < 12 else "middle"
        parts.append(_text(frame.x(at), frame.bottom + 12, label, size=9, anchor=anchor, fill=FAINT))
    return parts


def _curve(frame: Frame, points: Sequence[tuple[float, float]], colour: str, is_filled: bool) -> list[str]:
    """Return a line with gaps where values are missing."""
    parts: list[str] = []
    for piece in _pieces(points):
        drawn = [(frame.x(at), frame.y(value)) for at, value in piece]
        if len(drawn) == 1:
            drawn.append((drawn[0][0] + 1, drawn[0][1]))
        if is_filled:
            corners = [*drawn, (drawn[-1][0], frame.bottom), (drawn[0][0], frame.bottom)]
            steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
            # Opaque, because the series below are drawn later.
            parts.append(f'<path d="M{steps}Z" fill="{_paler(colour)}"/>')
        parts.append(_line(drawn, colour, stroke_width="1.3", stroke_linejoin="round"))
    return parts


def _paler(colour: str) -> str:
    return "#" + "".join(f"{round(255 - (255 - int(colour[i : i + 2], 16)) * 0.3):02x}" for i in (1, 3, 5))


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    gap = 1.5 * min((b[0] - a[0] for a, b in pairwise(points)), default=1.0)
    last = -math.inf
    for at, value in points:
        if not math.isfinite(value) or at - last > gap:
            pieces.append([])
        if math.isfinite(value):
            pieces[-1].append((at, value))
            last = at
    return [piece for piece in pieces if piece]


def _stacked(series: Sequence[Series]) -> list[list[tuple[float, float]]]:
    """Return the series stacked on each other."""
    below: dict[float, float] = {}
    found = []
    for each in series:
        points = []
        for at, value in each.points:
            below[at] = below.get(at, 0.0) + (value if math.isfinite(value) else 0.0)
            points.append((at, below[at]))
        found.append(points)
    return found


def _legend(place: GridPosition, names: Sequence[str], quiet: int) -> list[list[tuple[float, str, int]]]:
    """Return the lines of a legend: position, name and series number of each entry; -1 for no series."""
    lines: list[list[tuple[float, str, int]]] = [[]]
    left, right = place.x + 8, place.x + place.width - 8
    x: float = left
    for index, name in enumerate(names):
        shown = _cut(name, NAME_LENGTH)
        is_last = index == len(names) - 1
        room = right - (REST_WIDTH if len(lines) == LEGEND_LINES and (quiet or not is_last) else 0)
        if x + _width(shown) > room and lines[-1]:
            if len(lines) == LEGEND_LINES:
                lines[-1].append((x - 13, f"+ {len(names) + quiet - index} more", -1))
                return lines
            lines.append([])
            x = left
        lines[-1].append((x, shown, index))
        x += _width(shown)
    if quiet:
        if x + REST_WIDTH > right and len(lines) < LEGEND_LINES:
            lines.append([])
            x = left
        lines[-1].append((x - 13 if x > left else x, f"+ {quiet} at 0", -1))
    return [line for line in lines if any(name for _, name, _ in line)]


def _width(name: str) -> float:
    return 22 + CHARACTER * len(name) + 1.6 * sum(letter.isupper() for letter in name)


# ---- single values, tables, heatmaps


def _stat(panel: Panel, place: GridPosition, series: Sequence[Series], seconds: float) -> list[str]:
    points = [(at, value) for at, value in series[0].points if math.isfinite(value)]
    if not points:
        return [_text(place.x + place.width / 2, place.y + 56, "–", size=20, anchor="middle")]
    last = points[-1][1]
    colour = COLOURS[0]
    for limit, worse in zip((panel.warns_at, panel.alarms_at), LIMITS, strict=True):
        colour = worse if limit is not None and last >= limit else colour
    bottom = place.y + place.height
    largest = max(value for _, value in points) or 1.0
    frame = Frame(place.x + 1, bottom - 28, place.x + place.width - 1, bottom - 1, seconds, largest)
    return [
        *_curve(frame, points, _paler(colour), True),
        _text(place.x + place.width / 2, place.y + 46, formatted(last, panel.unit), size=19, anchor="middle",
              fill=colour, font_weight="600"),
    ]  # fmt: skip


def _table(panel: Panel, place: GridPosition, series: Sequence[Series], seconds: float) -> list[str]:
    headings = [heading for _, heading in panel.columns] + [panel.value_heading] * bool(panel.value_heading)
    rows = [
        [each.labels.get(label, "") for label, _ in panel.columns]
        + [formatted(each.points[-1][1], panel.unit)] * bool(panel.value_heading)
        for each in series
    ]
    rows.sort()
    wants = [min(44, max(len(row[i]) for row in [headings, *rows])) + 1.5 for i in range(len(headings))]
    lefts = [place.x + 8 + (place.width - 12) * sum(wants[:i]) / sum(wants) for i in range(len(wants))]
    room = int((place.height - 44) / 15)
    shown = rows[: room if len(rows) <= room else room - 1]
    parts = [
        _text(x, place.y + 33, name, size=9, fill=FAINT, font_weight="600")
        for x, name in zip(lefts, headings, strict=True)
    ]
    edges = [*lefts[1:], place.x + place.width - 4]
    for number, row in enumerate(shown):
        y = place.y + 49 + 15 * number
        parts.append(_line([(place.x + 8, y - 12), (place.x + place.width - 8, y - 12)], GRID))
        for x, edge, cell in zip(lefts, edges, row, strict=True):
            parts.append(_text(x, y, _cut(cell, max(3, int((edge - x) / CHARACTER))), size=9.5))
    if len(shown) < len(rows):
        parts.append(
            _text(place.x + 8, place.y + place.height - 6, f"+ {len(rows) - len(shown)} more", size=9)
        )
    return parts


def _heatmap(panel: Panel, place: GridPosition, series: Sequence[Series], seconds: float) -> list[str]:
    """Return a heatmap of bucket counts over time: one row per bucket, darker for larger counts."""
    bounds = sorted((float(each.labels["le"]), each.points) for each in series)
    rows: list[tuple[float, dict[float, float]]] = []
    below: dict[float, float] = {}
    for bound, points in bounds:
        counts = dict(points)
        rows.append((bound, {at: max(0.0, count - below.get(at, 0.0)) for at, count in counts.items()}))
        below = counts
    used = [i for i, (_, counts) in enumerate(rows) if max(counts.values(), default=0.0) > 0.01]
    rows = rows[used[0] : used[-1] + 1] if used else rows[:1]
    largest = max(value for _, counts in rows for value in counts.values()) or 1.0
    frame = Frame(
        place.x + 58, place.y + 28, place.x + place.width - 10, place.y + place.height - 22, seconds, 1
    )
    parts = _axes(frame, [], panel.unit)
    high = (frame.bottom - frame.top) / len(rows)
    for number, (bound, counts) in enumerate(rows):
        y = frame.bottom - (number + 1) * high
        if number % max(1, len(rows) // 6) == 0 and math.isfinite(bound):
            parts.append(
                _text(frame.left - 5, y + 3, formatted(bound, panel.unit), size=9, anchor="end", fill=FAINT)
            )
        step = min((b - a for a, b in pairwise(sorted(counts))), default=1.0)
        for at, count in counts.items():
            if count > 0.01:
                shade = 0.15 + 0.85 * math.sqrt(count / largest)
                where = f'x="{frame.x(at):.1f}" y="{y:.1f}" height="{high - 0.5:.1f}"'
                width = min(frame.x(at + step), frame.right) - frame.x(at)
                if width > 0:
                    parts.append(f'<rect {where} width="{width:.1f}" fill="#d9480f" opacity="{shade:.2f}"/>')
    return parts
