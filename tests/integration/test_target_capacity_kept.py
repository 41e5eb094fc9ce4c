"""The target capacity of an instance on a real cluster, whose store outlives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusters import running
from dask_processes import ExternalCluster, poll_for

import daskserve as serve


def answer(request: Any = None) -> str:
    return "done"


def test_the_capacity_outlives_the_instance_on_a_durable_store(
    external: ExternalCluster, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "dask_client": external.client,
        "http_options": {"port": 0},
        "store": f"sqlite:///{tmp_path}/serve.db",
        "name": "kept",
    }
    with serve.start(**options) as client:
        client.create_backend("b", answer, config={"num_replicas": 4})
        client.set_target_capacity(50)
        poll_for(lambda: len(running(client, "b")) == 2)
    with serve.start(**options) as client:
        assert (client.status().target_capacity, client.status().target_capacity_direction) == (50.0, "DOWN")
        poll_for(lambda: len(running(client, "b")) == 2)
        client.set_target_capacity(None)
        poll_for(lambda: len(running(client, "b")) == 4)
        client.delete_backend("b")
