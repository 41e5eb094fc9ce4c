"""The metrics of a controller about itself and its instance."""

from __future__ import annotations

from typing import Any

import pytest
from controller_harness import Stage, boom, staged

from daskserve.control.observed.observed import Observed, Scaling
from daskserve.control.records.state import State
from daskserve.control.views.metrics import ControlMetrics, bounded
from daskserve.errors import ReplicaStartError
from daskserve.telemetry.histogram import HistogramCounts


async def exported(stage: Stage) -> dict[tuple[str, ...], float]:
    """Return all series except durations, by name and by labels other than the instance's."""
    actor: Any = stage.cluster.actor(await stage.cluster.program.controller())
    found = {}
    for name, labels, value in actor.samples():
        assert labels[0] == stage.cluster.instance
        found[(name, *labels[1:])] = value.count if isinstance(value, HistogramCounts) else value
    return found


@staged()
async def test_the_current_deployments_goals_and_workers_are_exported(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    found = await exported(stage)
    assert found[("deployment_wanted_replicas", "b")] == 2
    assert found[("deployment_replicas", "b", "RUNNING")] == 2
    assert found[("deployment_status", "b", "HEALTHY")] == 1
    assert found[("controller_epoch",)] == 1
    assert (found[("goals_pending",)], found[("goals", "done")]) == (0, 1)
    assert (found[("workers", "usable")], found[("workers", "unresponsive")]) == (3, 0)
    assert found[("control_loop_duration_seconds",)] > 0
    await stage.delete()
    await stage.until(lambda: not stage.running)
    assert [key for key in await exported(stage) if key[0].startswith("deployment")] == []


@staged()
async def test_the_status_of_an_application_is_what_its_status_says(stage: Stage) -> None:
    await stage.run(graph={"back": (), "front": ("back",)})
    assert (await exported(stage))[("application_status", "default", "RUNNING")] == 1
    stage.start = boom()
    with pytest.raises(ReplicaStartError):
        await stage.run(graph={"back": (), "front": ("back",)}, front={"version": "broken"})
    found = [key for key in await exported(stage) if key[0] == "application_status"]
    assert found == [("application_status", "default", "DEPLOY_FAILED")]


@staged()
async def test_failures_are_counted(stage: Stage) -> None:
    stage.start = boom()
    with pytest.raises(ReplicaStartError):
        await stage.create()
    assert (await exported(stage))[("goals", "failed")] == 1


@staged()
async def test_the_next_controller_exports_the_same_deployments(stage: Stage) -> None:
    await stage.create(num_replicas=1)
    old: Any = stage.cluster.actor(await stage.cluster.program.controller())
    await stage.crash_controller()
    found = await exported(stage)
    assert found[("controller_epoch",)] == 2
    assert found[("deployment_wanted_replicas", "b")] == 1
    await stage.until(lambda: not any(name == "controller_epoch" for name, _, _ in old.samples()))
    assert {name for name, _, _ in old.samples()} >= {"goals", "control_loop_duration_seconds"}


def test_reasons_of_the_autoscaler_are_series_without_their_numbers() -> None:
    metrics = ControlMetrics()
    assert bounded("12 ongoing, 3.5 for each of 4") == "N ongoing, N for each of N"
    assert len(bounded("x" * 1000)) == 80
    observed = Observed()
    for tag, wanted, reason in (("b", 4, "12 ongoing"), ("c", 0, "idle for 60 s"), ("b", 5, "14 ongoing")):
        observed.scalings[tag] = Scaling(0.0, None, 1, 1, wanted, reason)
    found = {sample[:2]: sample[2] for sample in metrics.states("i", 1, State(), observed)}
    assert found["autoscaling_wanted_replicas", ("i", "b")] == 5
    assert found["autoscaling_reason", ("i", "b", "N ongoing")] == 1
    assert found["autoscaling_wanted_replicas", ("i", "c")] == 0
