"""The information that the replicas of a gang have about each other."""

from __future__ import annotations

from typing import Any

import daskserve as serve
from daskserve.testing import local_instance


@serve.deployment(
    num_replicas=4,
    gang_scheduling_config=serve.config.GangSchedulingConfig(gang_size=2),
    max_concurrent_queries=1,
)
class Part:
    def __call__(self) -> Any:
        context = serve.get_replica_context()
        gang = context.gang_context
        assert gang is not None
        assert gang.member_replica_ids[gang.rank] == context.replica_tag
        assert gang.pg_name == ""
        return gang.gang_id, gang.rank, gang.world_size, gang.member_replica_ids


@serve.deployment
class Alone:
    def __call__(self) -> bool:
        return serve.get_replica_context().gang_context is None


def test_a_replica_knows_its_gang() -> None:
    with local_instance() as client:
        handle = client.run(Part.bind())
        found = set()
        while len(found) < 4:
            gang_id, rank, size, members = handle.remote().result(timeout_s=10)
            assert (size, len(members)) == (2, 2)
            found.add((gang_id, rank))
        assert {rank for _, rank in found} == {0, 1}
        assert len({gang for gang, _ in found}) == 2
        assert client.run(Alone.bind(), name="alone", route_prefix=None).remote().result()
