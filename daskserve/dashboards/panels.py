"""What a dashboard is made of, and where its panels stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

#: How many columns Grafana's grid has.
GRID_COLUMNS = 24
#: Of a panel that shows one number, or no more than that needs.
FIGURE_WIDTH, FIGURE_HEIGHT = 3, 4


class PanelKind(Enum):
    """How a panel shows its data, by Grafana's names."""

    TIME_SERIES = "timeseries"
    STAT = "stat"
    TABLE = "table"
    HEATMAP = "heatmap"


class Unit(Enum):
    """Units of values, by Grafana's ids."""

    NUMBER = "short"
    SECONDS = "s"
    RATIO = "percentunit"
    REQUESTS_PER_S = "reqps"
    PER_S = "cps"
    BYTES = "bytes"
    BYTES_PER_S = "binBps"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression of PromQL, and what each of its series is called: ``{{label}}`` stands for a label."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard.

    Attributes
    ----------
    warns_at, alarms_at : float, optional
        Values from which on it is shown in yellow and in red.
    columns : mapping
        Of a table: the labels to be shown, in their order, by what heads them.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: Unit = Unit.NUMBER
    kind: PanelKind = PanelKind.TIME_SERIES
    width: int = 8
    height: int = 8
    warns_at: float | None = None
    alarms_at: float | None = None
    is_stacked: bool = False
    columns: Sequence[tuple[str, str]] = ()
    value_heading: str = ""


def figure(
    title: str,
    description: str,
    expression: str,
    unit: Unit = Unit.NUMBER,
    *,
    warns_at: float | None = None,
    alarms_at: float | None = None,
) -> Panel:
    """Return a panel that shows one number; eight of them fill a line."""
    return Panel(
        title,
        description,
        [Query(expression)],
        unit,
        PanelKind.STAT,
        width=FIGURE_WIDTH,
        height=FIGURE_HEIGHT,
        warns_at=warns_at,
        alarms_at=alarms_at,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; they fill the grid from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard: its identity, which must never change, and its rows."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    #: Whether one deployment is chosen, or any number of them.
    is_for_one_deployment: bool = False

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, in reading order."""
        for row in self.rows:
            yield from row.panels


@dataclass(frozen=True, slots=True)
class GridPosition:
    """Where something stands on Grafana's grid."""

    x: int
    y: int
    width: int
    height: int


def placed(dashboard: Dashboard) -> list[tuple[Row | Panel, GridPosition]]:
    """Return the headings of rows and the panels below them, each with its place."""
    found: list[tuple[Row | Panel, GridPosition]] = []
    y = 0
    for row in dashboard.rows:
        found.append((row, GridPosition(0, y, GRID_COLUMNS, 1)))
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > GRID_COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            found.append((panel, GridPosition(x, y, panel.width, panel.height)))
            x += panel.width
            tallest = max(tallest, panel.height)
        y += tallest
    return found
