"""Clusters without room for another replica, and events during an update."""

from __future__ import annotations

from typing import Any

from control_harness import Bench, worker

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend.actions import Action, StartReplica
from daskserve.control.views.backends import backend_status
from daskserve.errors import ReplicaStartError

BOOM = ReplicaStartError("the constructor raised", user_traceback="Traceback ...")


def full(replicas: int = 2, threads: int = 1, **fields: Any) -> Bench:
    """Return a bench whose workers are full with the first version of the deployment ``b``."""
    bench = Bench([worker(each + 1, threads=threads) for each in range(replicas // threads)])
    deploy(bench, "1", replicas, **fields)
    bench.settle()
    assert len(bench.tags(S.RUNNING)) == replicas
    return bench


def deploy(bench: Bench, version: str, replicas: int = 2, num_cpus: float = 1, **fields: Any) -> str:
    counted = {} if "autoscaling_config" in fields else {"num_replicas": replicas}
    return bench.deploy(version=version, actor_options={"num_cpus": num_cpus}, **counted, **fields)


def versions(bench: Bench, *states: S) -> list[str]:
    return sorted(
        each.named_version for each in bench.state.replicas_of("b") if not states or each.state in states
    )


def message(bench: Bench) -> str:
    return str(backend_status(bench.state, bench.observed, bench.state.backends["b"], bench.wall)["message"])


def lose_first(bench: Bench) -> None:
    """Lose the worker of the first replica; the worker then joins again."""
    for each in bench.state.replicas_of("b")[:1]:
        assert each.worker is not None or each.state is S.SHOULD_START
        if each.worker is not None:
            bench.observed.lost_workers.add(each.worker)
            bench.step()
            bench.observed.lost_workers.clear()


def step_with_failing_starts(bench: Bench, version: str) -> None:
    """Let all actions of one step succeed, except for the starts of a version."""
    for action in bench.step().actions:
        if isinstance(action, StartReplica) and action.replica.named_version == version:
            bench.observed.failed[action.replica.tag] = BOOM
        else:
            bench.succeed(action)


def play(bench: Bench, actions: list[Action], event: str) -> None:
    """Let all actions, one action or no action succeed, or let the starts fail."""
    for action in actions if event in ("all", "fail") else actions[:1] if event == "one" else []:
        if isinstance(action, StartReplica) and event == "fail":
            bench.observed.failed[action.replica.tag] = BOOM
        else:
            bench.succeed(action)
