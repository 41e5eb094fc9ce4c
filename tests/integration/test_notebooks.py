"""The notebooks in examples/ run unchanged, each in a separate kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent.parent / "examples/notebooks"


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Run a notebook; return the outputs of its cells by their media types, or by the stream's name."""
    monkeypatch.setenv("DASK_DASKSERVE__HTTP__PORT", "0")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [dict(output.get("data") or {output["name"]: output["text"]}) for output in outputs]


def test_a_model_is_changed_and_served_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, handle, called, fetched, changed, status = run("serve-a-model", tmp_path, monkeypatch)
    assert "Watch it at http" in "".join(started.values())
    assert "<th>handle of</th><td>prices/Price</td>" in handle["text/html"]
    assert (called["text/plain"], fetched["text/plain"]) == ("302804", "'{\"price\":302804}'")
    assert changed["text/plain"] == "100000"
    assert "prices" in status["text/html"]
    assert "RUNNING" in status["text/html"]


@pytest.mark.nightly
def test_a_batch_runs_beside_live_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, live, is_complete, *_ = run("batch-beside-live", tmp_path, monkeypatch)
    assert scores["text/plain"] == "(1000, [0, 1, 4, 9])"
    assert "live calls meanwhile" in live["text/plain"]
    assert is_complete["text/plain"] == "True"


@pytest.mark.nightly
def test_a_dataframe_is_scored_on_a_cluster_that_shrinks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [
        each["text/plain"] for each in run("score-a-dataframe", tmp_path, monkeypatch) if "text/plain" in each
    ]
    columns, rows, means, live, items, at_rest, status = outputs
    assert columns == "['city', 'm2', 'price']"
    assert rows == "12000"
    assert "'Metz': 15048750.0" in means
    assert live == "(250000, 560000)"
    assert items == "([25000, 27500, 30000, 32500, 35000], [25000, 50000, 75000])"
    assert at_rest == "(1, 12000, 250000)"
    assert "RUNNING" in status


@pytest.mark.nightly
def test_autoscaling_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, results, plot, changes = run("simulate-autoscaling", tmp_path, monkeypatch)
    assert requests["text/plain"].endswith(" requests'")
    for policy in ("target_ongoing_requests", "classic", "latency"):
        assert policy in results["stdout"]
        assert f">{policy}: " in plot["image/svg+xml"]
    assert " per replica wanted: " in changes["stdout"]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_its_outputs(path: Path) -> None:
    """The site shows them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs: list[Any] = [output for cell in cells for output in cell.get("outputs", ())]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert path.stat().st_size < 150 * 1024
