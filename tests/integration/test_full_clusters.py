"""Updates on a cluster without a free slot, while requests keep flowing."""

from __future__ import annotations

import time
from typing import Any

from clusters import Load, nannied_cluster
from dask_processes import fetch, poll_for

import daskserve as serve


def test_a_full_cluster_is_updated_and_no_request_fails() -> None:
    def deploy(version: str, start_s: float = 0.1) -> str | None:
        class Model:
            def __init__(self) -> None:
                time.sleep(start_s)

            def __call__(self, request: Any) -> str:
                return version

        return client.deploy(
            "e",
            Model,
            version=version,
            config={"num_replicas": 2},
            actor_options={"num_cpus": 1},
            blocking=False,
        )

    with (
        nannied_cluster(2, threads_per_worker=1) as dask,
        serve.start(dask_client=dask, http_options={"port": 0}) as client,
    ):
        client.wait_for_goal(deploy("1"))
        with Load(client.http_urls()[0]) as load:
            goal = deploy("2", start_s=0.5)
            poll_for(lambda: "no room for a new replica" in client.status().backends["e"].message)
            client.wait_for_goal(goal)
            assert fetch(f"{client.http_urls()[0]}/e").text == "2"
            load.more()
        assert load.failures == []
        backend = client.status().backends["e"]
        assert (backend.status, backend.running, backend.message) == ("HEALTHY", 2, "")
