"""Backends that are scaled quickly enough to be watched, and what is to be seen of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clusters import Load, running
from dask_processes import fetch, poll_for

import daskserve as serve

START_S = 0.5
#: What the first answer at zero replicas may take beyond the constructor, on a machine that does much else.
MARGIN_S = 1.0

#: Quick enough to be watched.
QUICK: Mapping[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "look_back_period_s": 2.0,
}


def slow_to_start(start_s: float = START_S, answer_s: float = 0.02) -> Any:
    """Return a class that takes its time; made here so that it is pickled by value."""

    class Slow:
        def __init__(self) -> None:
            time.sleep(start_s)

        def __call__(self, request: Any = None) -> str:
            time.sleep(answer_s)
            return "done"

    return Slow


def wanted(client: serve.Client) -> int:
    return client.status().backends["b"].wanted


def is_at_zero(client: serve.Client) -> bool:
    return not client.status().replicas("b")


def told(client: serve.Client) -> str:
    return str(client.explain("b"))


def from_nothing_to_many_and_back(client: serve.Client, url: str, config: Mapping[str, Any] = QUICK) -> None:
    """Hold requests at zero replicas, load the backend until all run, and let it go; nothing may fail."""
    most = config["max_replicas"]
    client.create_backend("b", slow_to_start(), config={"autoscaling_config": dict(config)})
    client.create_endpoint("e", backend="b", route="/e")
    assert is_at_zero(client)
    began = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        first = pool.submit(fetch, f"{url}/e")
        rest = [pool.submit(fetch, f"{url}/e") for _ in range(49)]
        assert first.result().status == 200
        assert time.monotonic() - began < START_S + MARGIN_S
        assert {each.result().status for each in rest} == {200}
    with Load(url, connections=4 * most) as load:
        poll_for(lambda: len(running(client, "b")) == most, what=lambda: told(client))
        load.more()
    assert load.failures == []
    poll_for(lambda: is_at_zero(client), what=lambda: told(client))
    assert client.status().backends["b"].status == "HEALTHY"
    events = client.explain("b").events
    assert events[-1].after == 0
    assert events[-1].reason in told(client)
    assert fetch(f"{url}/e").status == 200
