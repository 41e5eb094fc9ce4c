"""No request waits for a busy replica near the proxy while another replica is idle."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from dask_processes import fetch

import daskserve as serve

TOOK_S = 0.1
REQUESTS = 6


class OneAtATime:
    """Computes for one request at a time, as a model on a GPU does; answers with its replica's tag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> str:
        with self._lock:
            time.sleep(TOOK_S)
        return serve.get_current_replica_tag()


def load(url: str, clients: int) -> Counter[str]:
    """Return how many requests each replica answered, for clients that send one after the other."""
    served: Counter[str] = Counter()

    def ask() -> None:
        for _ in range(REQUESTS):
            served[fetch(f"{url}/e").text] += 1

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return served


@pytest.mark.parametrize("isolation", [pytest.param("thread", marks=pytest.mark.nightly), "process"])
@pytest.mark.parametrize(
    "limit", [pytest.param({}, marks=pytest.mark.nightly), {"max_concurrent_queries": 1}]
)
def test_all_replicas_share_the_load_wherever_they_run(
    client: serve.Client, url: str, isolation: str, limit: dict[str, int]
) -> None:
    config = {"num_replicas": 2, "isolation": isolation, **limit}
    client.create_backend("b", OneAtATime, config=config)
    client.create_endpoint("e", backend="b", route="/e")
    assert load(url, 2).total() == 2 * REQUESTS
    client.update_backend_config("b", {"num_replicas": 4})
    served = load(url, 4)
    assert served.total() == 4 * REQUESTS
    assert len(served) == 4
    # Four clients, four replicas: all have the same number, except for what happens in the first moments.
    assert min(served.values()) >= REQUESTS - 2
