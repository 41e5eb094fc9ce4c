"""Ray Serve with one replica; with the argument ``haproxy``, in its fastest configuration."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

if "haproxy" in sys.argv:
    os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_SERVE_THROUGHPUT_OPTIMIZED="1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class ReplicaRequest:
    async def __call__(self, request: Any) -> str:
        return "ok"


def main() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"port": 8123})
    serve.run(ReplicaRequest.bind())
    print("http://127.0.0.1:8123/", flush=True)
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
