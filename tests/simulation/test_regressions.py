"""Shortened schedules that once failed, each named after the bug.

`played` begins and ends a schedule: all faults end, the instance must come to rest, and the witness must
report no violation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from control_machine import ControlMachine
from tables import each_case

from daskserve.common.types import ReplicaState
from daskserve.errors import BadRequestError


@contextmanager
def played(**given: Any) -> Iterator[ControlMachine]:
    """Run the block's steps on an instance with the given options, then check that it comes to rest."""
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


def test_a_late_retry_of_a_deploy_is_refused_while_its_version_is_being_deleted() -> None:
    with played(stock="d", focus="d", latency_s=0.004) as state:
        state.rest()
        state.deploy("d", "2", "1", 3, "one", {}, "/x", seconds=0.01)
        state.delete_deployment("d", force=False, seconds=0.01)
        state.repeat(index=1, seconds=0.002)


def test_a_call_to_a_suspended_controller_fails_when_its_cluster_ends() -> None:
    with played(stock="a", latency_s=0.004, workers=2) as state:
        state.set_traffic("e", {"a": 0.25, "b": 0.75}, seconds=0.0)
        state.restart_cluster()
        state.harm_controller("suspend", seconds=5.0)
        state.call_old_controller(index=5, traffic={"d": 1.0}, seconds=0.002)
        state.restart_cluster()


def test_a_replaced_controller_does_not_answer_with_outdated_state() -> None:
    """The requested state existed when the controller was suspended, but no longer exists."""
    with played(stock="ad") as state:
        state.rest()
        state.harm_controller("suspend", seconds=5.0)
        state.set_traffic("e", {"d": 1.0}, seconds=0.1)
        state.call_old_controller(index=0, traffic={"a": 1.0}, seconds=0.1)
        state.resume_worker(index=0, seconds=0.1)


@each_case("seed", range(3))
def test_a_new_controller_waits_for_proxies_that_have_not_reported_yet(seed: int) -> None:
    with played(stock="a", location="EveryWorker", latency_s=0.004, seed=seed) as state:
        state.rest()
        state.deliver("late")
        state.harm_controller("kill", seconds=0.0)
        state.create_endpoint("d", "/x", "a", seconds=0.0)
        state.wait(7.0)


@each_case("stopped", range(3))
def test_a_suspended_proxy_does_not_block_callers_forever(stopped: int) -> None:
    with played(stock="a", location="EveryWorker", has_nannies=False) as state:
        state.rest()
        state.harm_worker(stopped, "suspend", seconds=0.0)
        state.delete_endpoint("e", seconds=0.0)
        state.wait(45.0)


@each_case("vanished", range(2))
def test_a_replica_that_routers_still_use_is_not_created_again(vanished: int) -> None:
    """A new controller does not find the replica, which may still run: its name must not be reused."""
    with played(stock="a") as state:
        state.rest()
        state.spoil_actor(vanished, "vanish")
        state.harm_controller("kill", seconds=2.0)


@each_case("seed", range(3))
def test_a_config_that_was_sent_without_confirmation_may_be_in_use(seed: int) -> None:
    """A change back to the old config must reach replicas that may already have the new one."""
    with played(stock="a", latency_s=0.004, seed=seed) as state:
        state.rest()
        state.script_lives("a", ["late", "late"], "well")
        state.reconfigure("a", "two", seconds=0.1)
        state.harm_controller("kill", seconds=0.0)
        state.reconfigure("a", "one", seconds=2.0)


def test_a_silent_process_has_not_refused_a_config() -> None:
    """While the store is unreachable, its replicas cannot be replaced before the call to them times out."""
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


@each_case("location", ["HeadOnly", "EveryWorker"])
def test_a_retired_worker_stays_until_its_proxy_has_ended(location: str) -> None:
    with played(location=location) as state:
        for index in range(3):
            state.rest()
            state.harm_worker(index, "retire", seconds=0.1)
        state.harm_controller("kill", seconds=2.0)


@each_case("max_surge", [0, 1])
@each_case("kind", ["restart", "suspend", "retire"])
def test_an_update_of_a_full_cluster_survives_a_worker(kind: str, max_surge: int) -> None:
    with played(stock="full", focus="d") as state:
        state.script_starts("d", ["fail", "slow"])
        state.deploy("d", "2", None, 3, None, {"num_cpus": 4}, "/x", 0.1, max_surge)
        replicas = state.world.witness.replicas("d")
        assert sorted(each.named_version for each in replicas) == ["1", "1", "2"]
        state.harm_worker(0, kind, seconds=2.0)
        state.harm_controller("kill", seconds=2.0)
        assert any(each.state is ReplicaState.RUNNING for each in state.world.witness.replicas("d"))


@each_case("kind", ["restart", "suspend", "retire"])
def test_an_update_to_replicas_that_need_the_room_of_two_survives_a_worker(kind: str) -> None:
    with played(stock="crowded", focus="d") as state:
        assert len(state.world.witness.replicas("d")) == 6
        state.script_starts("d", ["fail", "slow"])
        state.deploy("d", "2", None, -2, None, {"num_cpus": 4}, "/x", 0.1)
        versions = [
            each.named_version for each in state.world.witness.replicas("d") if each.worker is not None
        ]
        assert sorted(versions) == ["1"] * 4 + ["2"]
        state.harm_worker(0, kind, seconds=2.0)
        state.harm_controller("kill", seconds=2.0)
        assert any(each.state is ReplicaState.RUNNING for each in state.world.witness.replicas("d"))


@each_case("max_surge", [0, 1])
def test_a_version_that_never_starts_on_a_full_cluster_costs_one_replica(max_surge: int) -> None:
    with played(stock="full", focus="d") as state:
        state.script_starts("d", ["hang"] * 9)
        state.deploy("d", "2", None, 3, None, {"num_cpus": 4}, "/x", 0.1, max_surge)
        for _ in range(10):
            running = [
                each for each in state.world.witness.replicas("d") if each.state is ReplicaState.RUNNING
            ]
            assert [each.named_version for each in running] == ["1", "1"]
            state.wait(1.0)


def test_autoscaling_that_is_turned_on_for_a_gang_is_in_whole_gangs_or_refused() -> None:
    with played(stock="", focus="d") as state:
        state.deploy("d", "1", None, 2, None, {}, "/x", 2.0, gang=True)
        state.autoscale("d", 3, 2.0)  # no whole gang is within 3 to 3
        assert isinstance(state.world.calls[-1].error, BadRequestError)
        state.autoscale("d", 1, 2.0)
        state.load("d", 5, 8.0)
        assert len(state.world.witness.replicas("d")) == 2


def test_a_worker_that_holds_a_proxy_and_hangs_is_restarted_by_its_nanny() -> None:
    with played(stock="d", workers=2, location="EveryWorker") as state:
        worker = state.world._worker(1)
        state.harm_worker(1, "suspend", seconds=20.0)
        assert worker not in {each.address for each in state.world.cluster.workers()}
