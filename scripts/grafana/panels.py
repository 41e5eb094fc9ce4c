"""The parts of a dashboard and the layout of its panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

#: Number of columns of Grafana's grid.
GRID_COLUMNS = 24
#: Size of a panel that shows one number.
STAT_WIDTH, STAT_HEIGHT = 3, 4


class PanelKind(Enum):
    """The kinds of panels, with Grafana's names."""

    TIME_SERIES = "timeseries"
    STAT = "stat"
    TABLE = "table"
    HEATMAP = "heatmap"


class Unit(Enum):
    """The units of values, with Grafana's ids."""

    NUMBER = "short"
    SECONDS = "s"
    RATIO = "percentunit"
    REQUESTS_PER_S = "reqps"
    PER_S = "cps"
    BYTES = "bytes"
    BYTES_PER_S = "binBps"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series, in which ``{{label}}`` is replaced by the label."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard.

    Attributes
    ----------
    warns_at, alarms_at : float, optional
        Thresholds above which the value is shown in yellow and in red.
    columns : sequence of tuple
        The columns of a table in order, as pairs of label and heading.
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


def stat(
    title: str,
    description: str,
    expression: str,
    unit: Unit = Unit.NUMBER,
    *,
    warns_at: float | None = None,
    alarms_at: float | None = None,
) -> Panel:
    """Return a panel that shows one number; eight of them fill a row of the grid."""
    return Panel(
        title,
        description,
        [Query(expression)],
        unit,
        PanelKind.STAT,
        width=STAT_WIDTH,
        height=STAT_HEIGHT,
        warns_at=warns_at,
        alarms_at=alarms_at,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, laid out from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. Its ``uid`` must never change."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    #: Whether exactly one deployment is selected.
    is_for_one_deployment: bool = False

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, in reading order."""
        for row in self.rows:
            yield from row.panels


@dataclass(frozen=True, slots=True)
class GridPosition:
    """Position and size on Grafana's grid."""

    x: int
    y: int
    width: int
    height: int


def placed(dashboard: Dashboard) -> list[tuple[Row | Panel, GridPosition]]:
    """Return the row headings and panels with their positions."""
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
