"""Time until a change reaches every router, compared with the scheduler's bare pub/sub in the same run.

``set_traffic`` returns once every proxy and the caller's routers apply the change. So its time, which
includes the call and the write to the store, is an upper bound of the propagation time. Setup: two workers in
separate processes with a proxy each, and the caller. Floor: an event from this process through the scheduler
and back.

Run: ``python benchmarks/bench_long_poll.py``. It exits with 1 if the median exceeds the bound of 20 ms.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import Any

import daskserve as serve
from daskserve.cluster.worker.current import default_client

CHANGES = 200
BOUND_S = 0.020


def event_round_trips(dask: Any) -> list[float]:
    """Return the round-trip times of events from this process through the scheduler."""
    heard = threading.Event()
    dask.subscribe_topic("bench", lambda _: heard.set())
    took = []
    for number in range(CHANGES):
        heard.clear()
        began = time.perf_counter()
        dask.log_event("bench", number)
        if heard.wait(1.0) and number:  # the first event may be lost while the subscription starts
            took.append(time.perf_counter() - began)
    return took


def changes(client: serve.Client) -> list[float]:
    """Return the time of each traffic change until all routers apply it."""
    took = []
    for number in range(CHANGES):
        weight = 0.25 + (number % 2) / 2
        began = time.perf_counter()
        client.set_traffic("e", {"a": weight, "b": 1 - weight})
        took.append(time.perf_counter() - began)
    return took


def main() -> int:
    client = serve.start(http_options={"port": 0, "location": "EveryWorker"})
    for tag in "ab":
        client.create_backend(tag, lambda request: "ok")
    client.create_endpoint("e", backend="a", route="/e")
    client.get_handle("e").remote().result()
    floor = statistics.median(event_round_trips(default_client()))
    found = changes(client)
    middle = statistics.median(found)
    late = statistics.quantiles(found, n=100)[98]
    client.shutdown()
    print(
        f"a change at every router   {middle * 1e3:.1f} ms (p99 {late * 1e3:.1f})   an event through the "
        f"scheduler {floor * 1e3:.1f} ms   ratio {middle / floor:.1f}   bound {BOUND_S * 1e3:.0f} ms"
    )
    return 0 if middle <= BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
