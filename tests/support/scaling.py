"""Autoscaled backends with short delays, and helpers to observe them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clusters import Load, running
from dask_processes import fetch, poll_for

import daskserve as serve

START_S = 0.5
#: How much longer than the constructor the first answer at zero replicas may take on a busy machine.
MARGIN_S = 1.0

#: Options with short delays.
QUICK: Mapping[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "look_back_period_s": 2.0,
}


def slow_to_start(start_s: float = START_S, answer_s: float = 0.02) -> Any:
    """Return a class with a slow constructor; it is local, so that it is pickled by value."""

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


def explanation(client: serve.Client) -> str:
    return str(client.explain("b"))


def scale_from_zero_and_back(client: serve.Client, url: str, config: Mapping[str, Any] = QUICK) -> None:
    """Send requests at zero replicas, scale to the maximum under load and back; no request may fail."""
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
        poll_for(lambda: len(running(client, "b")) == most, what=lambda: explanation(client))
        load.more()
    assert load.failures == []
    poll_for(lambda: is_at_zero(client), what=lambda: explanation(client))
    assert client.status().backends["b"].status == "HEALTHY"
    events = client.explain("b").events
    assert events[-1].after == 0
    assert events[-1].reason in explanation(client)
    assert fetch(f"{url}/e").status == 200
