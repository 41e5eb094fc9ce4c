"""Tables, sparklines and plots of simulations."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.fleet import Service, SimulationResult, simulate
from daskserve.simulation.report import as_dict, changes, picture, resampled, sparkline, table
from daskserve.simulation.svg import plot
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
