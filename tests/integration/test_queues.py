"""The policy ``queue`` on a real cluster: the backlog in a real Redis scales the replicas."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import redis
from clusters import running
from dask_processes import ExternalCluster, poll_for
from redis_servers import SECRET, redis_server

import daskserve as serve


class Worker:
    """Takes tasks one by one from a list in Redis."""

    def __init__(self, url: str) -> None:
        self.connection = redis.Redis.from_url(url)
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self) -> None:
        while not self.is_over.wait(0.1):
            if self.connection.lpop("tasks") is not None:
                self.connection.incr("done")

    def __call__(self, request: Any = None) -> str:
        return "alive"

    def __del__(self) -> None:
        self.is_over.set()
        self.thread.join()
        self.connection.close()


def test_a_backlog_in_redis_scales_up_and_back_to_zero(
    client: serve.Client, external: ExternalCluster, tmp_path: Path
) -> None:
    def explanation() -> str:
        return str(client.explain("b"))

    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as connection:
        options = {
            "min_replicas": 0,
            "max_replicas": 4,
            "target_ongoing_requests": 2,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 1.0,
            "look_back_period_s": 1.0,
            "metrics_interval_s": 0.2,
            "policy": "queue",
            "policy_kwargs": {"broker_url": url, "queue_name": "tasks", "poll_interval_s": 0.2},
        }
        client.create_backend("b", Worker, url, config={"autoscaling_config": options})
        poll_for(lambda: "0 wait in queue 'tasks'" in explanation(), what=explanation)
        assert not client.status().replicas("b")
        connection.rpush("tasks", *range(60))
        poll_for(lambda: len(running(client, "b")) == 4, what=explanation)
        poll_for(lambda: connection.get("done") == b"60", what=explanation)
        poll_for(lambda: not client.status().replicas("b"), what=explanation)
        events = client.explain("b").events
        assert (events[0].before, events[0].after, events[-1].after) == (0, 4, 0)
        assert "wait in queue 'tasks'" in events[0].reason
        # The password appears nowhere but in the user's own config.
        views = [
            client.view(name) for name in ("get_all_backends", "get_backend_configs", "list_deployments")
        ]
        shown = f"{explanation()} {client.explain('b')!r} {client.status()!r} {client.snapshot()} {views}"
        assert SECRET not in f"{shown} {client.get_backend_config('b')!r} {client.list_backends()}"
        logs = (each for each in external.folder.iterdir() if each.suffix in (".out", ".err"))
        assert not any(SECRET in each.read_text() for each in logs)
        client.delete_backend("b")
