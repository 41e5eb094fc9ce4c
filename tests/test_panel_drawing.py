"""Drawing of panels for the documents."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import panel_drawing as drawing
from cases import for_each
from grafana.panels import Dashboard, Panel, PanelKind, Query, Row, Unit


def drawn(panel: Panel, series: list[Any]) -> ElementTree.Element:
    row = Row("r & r", [panel])
    text = drawing.screen(Dashboard("u", "t", "d", [row]), row, {panel.title: series}, 10.0)
    assert "nan" not in text
    assert "inf" not in text.lower().replace("info", "")
    return ElementTree.fromstring(text)


def texts(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter() if each.tag.endswith("}text")]


def line(name: str, *values: float, **labels: str) -> tuple[str, dict[str, str], list[tuple[float, float]]]:
    return name, labels, [(2.0 * number, value) for number, value in enumerate(values)]


@for_each(
    ("value", "unit", "text"),
    [
        (0.00025, Unit.SECONDS, "250 µs"),
        (90, Unit.SECONDS, "1.5 min"),
        (0.0712, Unit.RATIO, "7.12%"),
        (3 << 20, Unit.BYTES_PER_S, "3 MiB/s"),
        (1234, Unit.REQUESTS_PER_S, "1.23 K req/s"),
        (0.25, Unit.PER_S, "0.25/s"),
        (0, Unit.SECONDS, "0 s"),
        (0, Unit.NUMBER, "0"),
    ],
)
def test_values_are_formatted_with_their_units(value: float, unit: Unit, text: str) -> None:
    assert drawing.formatted(value, unit) == text


def test_axes_end_at_a_round_number_above_the_largest_value() -> None:
    for largest in (0.0, 0.003, 0.4, 1, 3, 7, 99, 101, 12345, 3e8):
        for unit in Unit:
            values = drawing.ticks(largest, unit)
            assert values[0] == 0
            assert values[-1] >= largest * (1 - 1e-9)
            assert 2 <= len(values) <= 6
    assert drawing.ticks(3, Unit.NUMBER) == [0, 1, 2, 3]
    assert drawing.ticks(math.nan, Unit.NUMBER)[-1] == 1


def test_a_line_has_a_gap_where_values_are_missing() -> None:
    panel = Panel("p < q", "about.", [Query("x")])
    root = drawn(panel, [drawing.Series(*line("one <two>", 1, 2, math.nan, 4, 5))])
    curves = [each for each in root.iter() if each.get("stroke-width") == "1.3"]
    assert len(curves) == 2
    assert {"p < q", "one <two>", "t › r & r"} <= set(texts(root))


def test_stacked_lines_add_up() -> None:
    lines = [drawing.Series(*line("a", 1, 2)), drawing.Series(*line("b", 3, 4))]
    assert drawing._stacked(lines) == [[(0, 1), (2, 2)], [(0, 4), (2, 6)]]


def test_a_legend_counts_the_omitted_entries() -> None:
    panel = Panel("p", "about.", [Query("x")])
    many = [drawing.Series(*line(f"a rather long name {number}", number)) for number in range(20)]
    shown_texts = texts(drawn(panel, many))
    shown = sum(each.startswith("a rather") for each in shown_texts)
    assert 3 <= shown < 19
    assert f"+ {20 - shown} more" in shown_texts
    few = [drawing.Series(*line(f"n{number}", number % 2)) for number in range(6)]
    assert "+ 3 at 0" in texts(drawn(panel, few))


def test_values_tables_and_heatmaps_are_drawn() -> None:
    stat = Panel("s", "about.", [Query("x")], Unit.RATIO, PanelKind.STAT, width=3, height=4, alarms_at=0.05)
    root = drawn(stat, [drawing.Series(*line("", 0.01, 0.5, math.nan))])
    assert "50%" in texts(root)
    assert any(each.text == "50%" and each.get("fill") == drawing.LIMITS[1] for each in root.iter())
    table = Panel("t", "about.", [Query("x")], kind=PanelKind.TABLE, columns=[("a", "A")], value_heading="v")
    rows = [drawing.Series(*line("", 1, a=f"cell {number:02}")) for number in range(30)]
    shown_texts = texts(drawn(table, rows))
    assert {"A", "v", "cell 00"} <= set(shown_texts)
    assert f"+ {30 - sum(each.startswith('cell') for each in shown_texts)} more" in shown_texts
    heat = Panel("h", "about.", [Query("x")], Unit.SECONDS, PanelKind.HEATMAP)
    buckets = [("0.1", 1), ("0.5", 5), ("+Inf", 5)]
    root = drawn(heat, [drawing.Series(*line("", n, n, le=le)) for le, n in buckets])
    assert sum(each.get("fill") == "#d9480f" for each in root.iter()) == 4


def test_a_panel_without_series_says_no_data() -> None:
    for kind in PanelKind:
        assert "No data" in texts(drawn(Panel("p", "about.", [Query("x")], kind=kind), []))
