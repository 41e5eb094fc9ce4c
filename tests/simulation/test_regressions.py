"""Schedules that once failed, shortened, each under the name of what was wrong.

`played` begins a schedule and ends it: all faults heal, the instance must come to rest, and the witness
must have nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
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


def test_a_replaced_controller_does_not_answer_from_memory() -> None:
    """What it is asked for was so when it was stopped, and is not any more."""
    with played(stock="ad") as state:
        state.rest()
        state.harm_controller("suspend", seconds=5.0)
        state.set_traffic("e", {"d": 1.0}, seconds=0.1)
        state.ask_old_controller(index=0, traffic={"a": 1.0}, seconds=0.1)
        state.resume_worker(index=0, seconds=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_new_controller_waits_for_proxies_that_it_has_not_heard_of_yet(seed: int) -> None:
    with played(stock="a", location="EveryWorker", latency_s=0.004, seed=seed) as state:
        state.rest()
        state.deliver("late")
        state.harm_controller("kill", seconds=0.0)
        state.create_endpoint("d", "/x", "a", seconds=0.0)
        state.wait(7.0)


@pytest.mark.parametrize("stopped", range(3))
def test_a_stopped_proxy_does_not_keep_callers_waiting_for_ever(stopped: int) -> None:
    with played(stock="a", location="EveryWorker", has_nannies=False) as state:
        state.rest()
        state.harm_worker(stopped, "suspend", seconds=0.0)
        state.delete_endpoint("e", seconds=0.0)
        state.wait(45.0)


@pytest.mark.parametrize("vanished", range(2))
def test_a_replica_that_runs_as_far_as_routers_know_is_not_made_again(vanished: int) -> None:
    """A new controller finds it gone; another one with its name could be one too many."""
    with played(stock="a") as state:
        state.rest()
        state.spoil_actor(vanished, "vanish")
        state.harm_controller("kill", seconds=2.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_config_that_was_sent_and_not_confirmed_is_not_taken_for_the_old_one(seed: int) -> None:
    """Going back to the old config must reach replicas that may have the new one by now."""
    with played(stock="a", latency_s=0.004, seed=seed) as state:
        state.rest()
        state.script_lives("a", ["late", "late"], "well")
        state.reconfigure("a", "two", seconds=0.1)
        state.harm_controller("kill", seconds=0.0)
        state.reconfigure("a", "one", seconds=2.0)


def test_the_silence_of_a_stopped_process_is_no_refusal_of_a_config() -> None:
    """With the store away, its replicas cannot be replaced before the call to them has timed out."""
    with played(workers=2, has_nannies=False, stock="d") as state:
        state.rest()
        state.rest()
        state.reconfigure("d", "two", seconds=0.0)
        state.harm_worker(1, "suspend", seconds=0.002)
        state.harm_store("reach", 3)
        state.wait(8.0)


def test_a_version_that_does_not_start_gives_its_route_back() -> None:
    with played(stock="d", focus="d") as state:
        state.rest()
        witness = state.world.witness
        before = witness.wanted.endpoints
        state.script_starts("d", ["fail"] * 4)
        state.deploy("d", "2", None, 1, None, {}, "/elsewhere", seconds=0.1)
        state.rest()
        assert any(each.route == "/elsewhere" for then in witness.history for each in then.endpoints.values())
        assert witness.wanted.endpoints == before
