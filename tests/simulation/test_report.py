"""Tables, sparklines and plots of simulations."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.fleet import Service, SimulationResult, simulate
from daskserve.simulation.report import as_dict, changes, picture, resampled, sparkline, table
from daskserve.simulation.svg import COLOURS, plot
from daskserve.simulation.trace import Trace


def outcome(name: str = "ours") -> SimulationResult:
    trace = Trace([20.0] * 60 + [200.0] * 60)
    return simulate(trace, AutoscalingConfig(max_replicas=30), Service(4, 0.1), name=name)


def test_sparklines_show_peaks_and_every_value_above_zero() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert sparkline([0.0, 0.001, 100]) == " ▁█"
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "  "
    assert resampled([0, 9, 0, 0, 1, 0], 2) == [9, 1]


def test_a_table_has_a_line_per_policy_and_costs_if_there_is_a_price() -> None:
    lines = table([outcome(), outcome("<other>")]).splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "ours", "<other>"]
    assert "cost" not in lines[0]
    assert len({len(line) for line in lines}) == 1
    assert "cost" in table([outcome()], price=2.0)
    found = as_dict(outcome(), price=2.0)
    assert found["cost"] == pytest.approx(2 * found["replica_hours"], abs=1e-3)
    assert json.loads(json.dumps(found)) == found


def test_sparklines_and_changes_describe_the_result() -> None:
    found = outcome()
    assert "requests/s |" in picture(found)
    assert picture(found).startswith("ours, 2 min")
    first = changes(found).splitlines()[0]
    assert " s  1 to " in first
    assert "queued" in first
    assert changes(found, most=1).splitlines()[-1].strip() == f"and {len(found.history.changes) - 1} more"
    everything = len(found.history.changes)
    assert len(changes(found, most=everything).splitlines()) == everything


def test_a_plot_is_well_formed_and_small() -> None:
    text = plot([outcome(), outcome("<other> & more")])
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert any(each and each.startswith("<other> & more: ") for each in texts)
    paths = [element.get("d", "") for element in root.iter() if element.tag.endswith("path")]
    assert len(paths) == 4 + 1 + 3 * 2
    assert not any("nan" in path for path in paths)
    assert len(text) < 20_000
    # The requests rise from 20 to 200 per second halfway: a tenth of the panel's height, then all of it.
    assert paths[:2] == ["M70 40V170H880", "M70.0 157.0H475.0V40.0H880"]
    axis = ["requests/s", "200", "0", "0 s", "30 s", "60 s", "90 s", "120 s"]
    assert texts[2 : 2 + len(axis)] == axis
    colours = [element.get("stroke") for element in root.iter() if element.tag.endswith("path")]
    assert colours[3:5] == [COLOURS[0], COLOURS[1]]


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (300, ["0 s", "75 s"]),
        (304, ["0 min", "1.27 min"]),
        (7204, ["0 h", "0.5 h"]),
        (7200, ["0 min", "30 min"]),
    ],
)
def test_the_axis_of_a_plot_is_in_seconds_minutes_or_hours(seconds: int, labels: list[str]) -> None:
    found = simulate(Trace([1.0] * seconds), AutoscalingConfig(max_replicas=2), Service(4, 0.1))
    texts = [each.text for each in ET.fromstring(plot([found])).iter() if each.tag.endswith("text")]
    assert texts[4:6] == labels


@pytest.mark.parametrize(
    ("value", "end"),
    [(0, "1"), (0.03, "0.05"), (1, "1"), (1.1, "2"), (2.1, "2.5"), (300, "500"), (600, "1000")],
)
def test_an_axis_ends_with_a_round_number(value: float, end: str) -> None:
    found = simulate(Trace([value] * 5), AutoscalingConfig(max_replicas=2), Service(4, 0.1))
    texts = [each.text for each in ET.fromstring(plot([found])).iter() if each.tag.endswith("text")]
    assert texts[2] == end
