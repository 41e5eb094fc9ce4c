"""The documents of the panels. Importing this imports bokeh and Dask's dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bokeh.layouts import gridplot
from bokeh.models import ColumnDataSource, DatetimeTickFormatter, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.palettes import Category10
from bokeh.plotting import figure

from daskserve.cluster.scheduler.http.panels.dashboard_internals import (
    TEMPLATES,
    THEME,
    add_periodic_callback,
    update_source,
)
from daskserve.cluster.scheduler.http.panels.feed import PERIOD_S, PanelFeed
from daskserve.cluster.scheduler.http.panels.series import PATH, SHOWN_S
from daskserve.loops.event_loop import running_loop

COLOURS: Sequence[str] = Category10[10]
#: Prefix of the path of each panel; paths of panels in JupyterLab begin with "individual-".
PANEL = "/individual-daskserve-"
#: How long a thread waits for the event loop; it may wait in vain, because the loop may have ended.
_FILLED_S = 30.0


class LinePanel:
    """A line for each of the busiest deployments, over time."""

    def __init__(
        self,
        feed: PanelFeed,
        title: str,
        metrics: Sequence[tuple[str, str]],
        *,
        unit: str,
        adds_up: bool = True,
        **more: Any,
    ) -> None:
        self._feed = feed
        self._metrics = metrics
        self._adds_up = adds_up
        self.source = ColumnDataSource(self._columns())
        self.root = _figure(
            title=title,
            x_axis_type="datetime",
            tools="xpan,xwheel_zoom,reset",
            toolbar_location="above",
            y_axis_label=unit,
            **more,
        )
        self.root.y_range.start = 0
        self.root.xaxis.formatter = DatetimeTickFormatter(
            seconds="%H:%M:%S", minsec="%H:%M:%S", minutes="%H:%M", hourmin="%H:%M"
        )
        self.root.yaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
        self.root.multi_line(
            xs="xs",
            ys="ys",
            line_color="colour",
            line_dash="dash",
            line_width=2,
            legend_field="label",
            source=self.source,
        )
        _put_legend_beside(self.root)
        tips = [("deployment", "@name"), ("metric", "@what"), ("now", "@last")]
        self.root.add_tools(HoverTool(tooltips=tips, line_policy="nearest"))
        self.root.x_range.follow = "end"
        self.root.x_range.follow_interval = 1000 * SHOWN_S

    def _columns(self) -> dict[str, list[Any]]:
        return self._feed.series.columns(self._metrics, COLOURS, adds_up=self._adds_up)

    def update(self) -> None:
        """Show the newest values."""
        update_source(self.source, self._columns())


class ReplicaPanel:
    """The replicas on each worker, by deployment."""

    def __init__(self, feed: PanelFeed, title: str, **more: Any) -> None:
        self._feed = feed
        columns = feed.series.replicas(COLOURS)
        self.source = ColumnDataSource(columns)
        self.root = _figure(
            title=title,
            y_range=FactorRange(factors=_factors(columns)),
            tools="",
            toolbar_location=None,
            x_axis_label="replicas",
            **more,
        )
        self.root.x_range.start = 0
        self.root.xaxis.ticker.min_interval = 1
        self.root.hbar(
            y="worker",
            left="left",
            right="right",
            height=0.8,
            fill_color="colour",
            line_color="white",
            legend_field="label",
            source=self.source,
        )
        _put_legend_beside(self.root)
        tips = [("worker", "@worker"), ("deployment", "@deployment"), ("replicas", "@count")]
        self.root.add_tools(HoverTool(tooltips=tips))

    def update(self) -> None:
        """Show the current replicas."""
        columns = self._feed.series.replicas(COLOURS)
        factors = _factors(columns)
        if self.root.y_range.factors != factors:
            self.root.y_range.factors = factors
        update_source(self.source, columns)


def _figure(**options: Any) -> Any:
    """Return a figure; bokeh's types do not say which kind of range a figure has."""
    return figure(**options)


def _put_legend_beside(root: Any) -> None:
    """Move the legend of a figure to its right, where it covers no values."""
    legend = root.legend[0]
    root.add_layout(legend, "right")
    legend.border_line_alpha = legend.background_fill_alpha = 0
    legend.label_text_font_size = "8pt"
    legend.spacing = 0
    legend.padding = 0


def _factors(columns: Mapping[str, list[Any]]) -> list[str]:
    return sorted(set(columns["worker"]), reverse=True)


#: The panels by the last part of their path.
PANELS: Mapping[str, Callable[..., Any]] = {
    "replicas": partial(ReplicaPanel, title="daskserve: replicas by worker"),
    "requests": partial(
        LinePanel,
        title="daskserve: requests per second",
        metrics=[("requests_per_s", "solid"), ("errors_per_s", "dotted")],
        unit="1/s",
    ),
    "in-flight": partial(
        LinePanel, title="daskserve: requests in flight", metrics=[("ongoing", "solid")], unit="requests"
    ),
    "latency": partial(
        LinePanel,
        title="daskserve: latency, median and 99th percentile (dashed)",
        metrics=[("latency_p50_s", "solid"), ("latency_p99_s", "dashed")],
        unit="s",
        adds_up=False,
    ),
    "queue": partial(
        LinePanel, title="daskserve: queued requests", metrics=[("queued", "solid")], unit="requests"
    ),
}


def documents(feed: PanelFeed, extra: Mapping[str, Any]) -> dict[str, Callable[[Any], None]]:
    """Return the functions that fill the documents, by path.

    They can be called in any thread; bokeh 3.10 calls them in a separate thread. They work on the event loop
    that runs now, because the metrics change there.

    Parameters
    ----------
    extra : mapping
        The variables of Dask's template.
    """
    found: dict[str, Callable[[Any], None]] = {PATH: partial(_fill_page, feed, extra)}
    found |= {f"{PANEL}{name}": partial(_fill_panel, feed, name) for name in PANELS}
    loop = asyncio.get_running_loop()
    return {path: partial(_fill_on_loop, loop, fill) for path, fill in found.items()}


def _fill_on_loop(loop: asyncio.AbstractEventLoop, fill: Callable[[Any], None], doc: Any) -> None:
    async def fill_there() -> None:
        fill(doc)

    if running_loop() is loop:
        fill(doc)
    else:
        asyncio.run_coroutine_threadsafe(fill_there(), loop).result(_FILLED_S)


def _fill_panel(feed: PanelFeed, name: str, doc: Any) -> None:
    panel = PANELS[name](feed, sizing_mode="stretch_both")
    _follow(feed, doc, [panel])
    doc.add_root(panel.root)
    doc.title = f"daskserve: {name}"


def _fill_page(feed: PanelFeed, extra: Mapping[str, Any], doc: Any) -> None:
    panels = [make(feed, height=300, sizing_mode="stretch_width") for make in PANELS.values()]
    _follow(feed, doc, panels)
    doc.add_root(gridplot([each.root for each in panels], ncols=2, sizing_mode="stretch_width"))
    doc.title = "daskserve"
    doc.template = TEMPLATES.get_template("simple.html")
    doc.template_variables.update(extra)


def _follow(feed: PanelFeed, doc: Any, panels: Sequence[Any]) -> None:
    """Update the panels of a document until its session ends."""
    feed.join()
    doc.on_session_destroyed(lambda _: feed.leave())
    for each in panels:
        add_periodic_callback(doc, each, round(1000 * PERIOD_S))
    doc.theme = THEME
