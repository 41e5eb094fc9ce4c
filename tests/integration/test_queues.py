"""The policy ``queue`` on a real cluster: the backlog at a broker scales the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brokers import Redis, management_api, needs_redis, redis_server
from clusters import running
from dask_processes import ExternalCluster, poll_for

import daskserve as serve

SECRET = "s3cr3t"
#: Options with short delays.
QUICK: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
    "look_back_period_s": 1.0,
    "metrics_interval_s": 0.2,
    "policy": "queue",
}


def explanation(client: serve.Client) -> str:
    return str(client.explain("b"))


def worker_that_takes(url: str, name: str) -> Any:
    """Return a class that takes tasks one by one from a list in Redis; it is pickled by value."""

    class Worker:
        def __init__(self) -> None:
            import threading

            import redis

            self.connection = redis.Redis.from_url(url)
            self.is_over = threading.Event()
            self.thread = threading.Thread(target=self.work)
            self.thread.start()

        def work(self) -> None:
            while not self.is_over.wait(0.1):
                if self.connection.lpop(name) is not None:
                    self.connection.incr("done")

        def __call__(self, request: Any = None) -> str:
            return "alive"

        def __del__(self) -> None:
            self.is_over.set()
            self.thread.join()
            self.connection.close()

    return Worker


def idle(request: Any = None) -> str:
    return "alive"


def create(client: serve.Client, definition: Any = idle, **kwargs: Any) -> None:
    given = {"queue_name": "tasks", "poll_interval_s": 0.2, **kwargs}
    client.create_backend("b", definition, config={"autoscaling_config": {**QUICK, "policy_kwargs": given}})


@needs_redis
def test_a_backlog_in_redis_scales_up_and_back_to_zero(
    client: serve.Client, external: ExternalCluster, tmp_path: Path
) -> None:
    with redis_server(tmp_path, SECRET) as server, server.connect() as connection:
        create(client, worker_that_takes(server.url, "tasks"), broker_url=server.url)
        poll_for(lambda: "0 wait in queue 'tasks'" in explanation(client), what=lambda: explanation(client))
        assert not client.status().replicas("b")
        connection.rpush("tasks", *range(60))
        poll_for(lambda: len(running(client, "b")) == 4, what=lambda: explanation(client))
        poll_for(lambda: connection.get("done") == b"60", what=lambda: explanation(client))
        poll_for(lambda: not client.status().replicas("b"), what=lambda: explanation(client))
        events = client.explain("b").events
        assert (events[0].before, events[0].after) == (0, 4)
        assert "wait in queue 'tasks'" in events[0].reason
        assert events[-1].after == 0
        assert_hidden(client, external, has_trouble=False)
        client.delete_backend("b")


def assert_hidden(client: serve.Client, external: ExternalCluster, *, has_trouble: bool = True) -> None:
    """Fail if the password appears anywhere but in the user's own config."""
    found = f"{explanation(client)} {client.explain('b')!r} {client.status()!r} {client.snapshot()}"
    views = [client.view(name) for name in ("get_all_backends", "get_backend_configs", "list_deployments")]
    config = client.get_backend_config("b")
    assert SECRET not in f"{found} {views} {config!r} {client.list_backends()}"
    logs = "".join(path.read_text() for path in external.folder.iterdir() if path.suffix in (".out", ".err"))
    assert SECRET not in logs
    assert not has_trouble or "cannot be read" in logs
    assert config.autoscaling_config is not None
    assert SECRET in config.autoscaling_config.policy_kwargs["broker_url"]


def priorities(server: Redis) -> int:
    with server.connect() as connection:
        return int(connection.lpush("tasks\x06\x163", *"abc") + connection.lpush("tasks\x06\x169", *"defg"))


@needs_redis
def test_a_redis_outage_removes_no_replica(
    client: serve.Client, external: ExternalCluster, tmp_path: Path
) -> None:
    with redis_server(tmp_path, SECRET) as server:
        create(client, broker_url=f"unix://{server.socket}?db=0&password={SECRET}")
        assert priorities(server) == 7
        poll_for(lambda: len(running(client, "b")) == 4, what=lambda: explanation(client))
        assert "7 wait in queue 'tasks'" in explanation(client)
        server.stop()
        # The last length still counts for a moment after the first error.
        parts = ("the length of queue 'tasks' is unknown", "cannot be read: ConnectionError")
        poll_for(lambda: all(part in explanation(client) for part in parts), what=lambda: explanation(client))
        assert_hidden(client, external)
        server.start()  # empty
        poll_for(lambda: not client.status().replicas("b"), what=lambda: explanation(client))
        with server.connect() as connection:
            connection.set("tasks", "no list")
        poll_for(lambda: "WRONGTYPE" in explanation(client), what=lambda: explanation(client))
        client.update_backend_config(
            "b",
            {
                "autoscaling_config": {
                    **QUICK,
                    "policy_kwargs": {
                        "broker_url": server.url.replace(SECRET, "wr0ng"),
                        "queue_name": "tasks",
                        "poll_interval_s": 0.2,
                    },
                }
            },
        )
        poll_for(lambda: "AuthenticationError" in explanation(client), what=lambda: explanation(client))
        assert "wr0ng" not in explanation(client)


def test_a_backlog_in_rabbitmq_starts_replicas(client: serve.Client, external: ExternalCluster) -> None:
    lengths = {"prod%2Feu/tasks": 0}
    with management_api(lengths, f"user:{SECRET}") as address:
        broker = f"amqp://user:{SECRET}@127.0.0.1:1/prod%2Feu"
        create(client, broker_url=broker, rabbitmq_management_url=address)
        poll_for(lambda: "0 wait in queue 'tasks'" in explanation(client), what=lambda: explanation(client))
        lengths["prod%2Feu/tasks"] = 5
        poll_for(lambda: len(running(client, "b")) == 3, what=lambda: explanation(client))
        del lengths["prod%2Feu/tasks"]
        poll_for(lambda: "there is no queue 'tasks'" in explanation(client), what=lambda: explanation(client))
        poll_for(lambda: "not fewer than 3" in explanation(client), what=lambda: explanation(client))
        assert_hidden(client, external)
        lengths["prod%2Feu/tasks"] = 0
        poll_for(lambda: not client.status().replicas("b"), what=lambda: explanation(client))
        create_config = {
            "broker_url": broker.replace(SECRET, "wr0ng"),
            "rabbitmq_management_url": address,
            "queue_name": "tasks",
            "poll_interval_s": 0.2,
        }
        client.update_backend_config("b", {"autoscaling_config": {**QUICK, "policy_kwargs": create_config}})
        poll_for(
            lambda: "refuses the username or the password" in explanation(client),
            what=lambda: explanation(client),
        )
        assert "wr0ng" not in explanation(client)
