"""Schedules that once failed, shortened, each under the name of what was wrong.

`played` begins a schedule and ends it: all faults heal, the instance must come to rest, and the witness
must have nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from control_machine import ControlMachine


@contextmanager
def played(**given: Any) -> Iterator[ControlMachine]:
    """Play the block's steps on an instance that begins with the given options; then all must be well."""
    state = ControlMachine()
    options = {
        "seed": 0,
        "workers": 3,
        "location": "NoServer",
        "latency_s": 0.0,
        "has_nannies": True,
        "stock": "",
        "focus": None,
    }
    state.begin(**{**options, **given})
    try:
        yield state
    except BaseException:
        state.world.close()
        raise
    state.teardown()


def test_a_late_retry_of_a_deploy_over_a_version_that_is_being_deleted_is_refused() -> None:
    with played(stock="d", focus="d", latency_s=0.004) as state:
        state.rest()
        state.deploy("d", "2", "1", 3, "one", {}, "/x", seconds=0.01)
        state.delete_deployment("d", force=False, seconds=0.01)
        state.repeat(index=1, seconds=0.002)


def test_a_call_on_its_way_to_a_stopped_controller_fails_when_its_cluster_is_gone() -> None:
    with played(stock="a", latency_s=0.004, workers=2) as state:
        state.set_traffic("e", {"a": 0.25, "b": 0.75}, seconds=0.0)
        state.start_anew()
        state.harm_controller("suspend", seconds=5.0)
        state.ask_old_controller(index=5, traffic={"d": 1.0}, seconds=0.002)
        state.start_anew()
