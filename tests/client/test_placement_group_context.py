"""The information that a replica has about its placement group."""

from __future__ import annotations

from typing import Any

import pytest

import daskserve as serve
from daskserve.testing import local_instance


@serve.deployment(placement_group_bundles=[{"CPU": 1}, {"CPU": 3}], placement_group_strategy="SPREAD")
class Whole:
    def __init__(self) -> None:
        self.first = serve.get_replica_context().placement_group

    def __call__(self) -> Any:
        assert serve.get_replica_context().placement_group == self.first
        return self.first


@serve.deployment
class Alone:
    def __call__(self) -> bool:
        return serve.get_replica_context().placement_group is None


def test_a_replica_knows_its_bundles() -> None:
    with local_instance(workers=2) as client:
        group = client.run(Whole.bind()).remote().result(timeout_s=10)
        own, other = group.bundles
        assert (own.resources, other.resources) == ({"CPU": 1}, {"CPU": 3})
        (actor,) = [each for each in client.status().actors if each.kind == "replica"]
        assert own.worker == actor.worker
        assert len({own.worker, other.worker}) == 2
        assert client.run(Alone.bind(), name="alone", route_prefix=None).remote().result(timeout_s=10)


def test_tasks_see_declared_resources_only() -> None:
    bundle = serve.context.PlacementBundle("tcp://w1", {"CPU": 2, "memory": 5, "GPU": 1, "license": 2})
    assert bundle.dask_resources == {"GPU": 1, "license": 2}


def test_the_local_mode_has_no_groups_and_no_gangs() -> None:
    with pytest.warns(UserWarning, match="locally without placement_group_bundles and placement_group_strat"):
        handle = serve.run(Whole.bind(), local=True)
    try:
        assert handle.remote().result(timeout_s=10) is None
        gang = Alone.options(num_replicas=2, gang_scheduling_config={"gang_size": 2})
        with pytest.warns(UserWarning, match="locally without gang_scheduling_config"):
            assert serve.run(gang.bind(), local=True).remote().result(timeout_s=10)
    finally:
        serve.shutdown()
