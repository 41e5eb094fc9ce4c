"""Values of Dask and the calls that use them."""

from __future__ import annotations

from typing import Any

import numpy as np
from dask_processes import ExternalCluster
from distributed import get_worker

import daskserve as serve

LIMIT_S = 30


class Model:
    def place(self, value: Any, *others: Any) -> tuple[str, bool]:
        worker = get_worker()
        held = dict(worker.data)
        return worker.address, any(each is value for each in held.values())


def test_a_call_goes_to_its_data_and_takes_it_without_a_copy(
    client: serve.Client, external: ExternalCluster
) -> None:
    client.deploy("model", Model, config={"num_replicas": 2})
    handle, dask = client.get_handle("model"), external.client
    small = dask.scatter(np.ones(10), hash=False)
    for worker in [*dask.scheduler_info()["workers"]] * 2:
        large = dask.submit(np.ones, 1_000_000, workers=[worker], pure=False)
        assert handle.place.remote(large, small).result(LIMIT_S) == (worker, True)
