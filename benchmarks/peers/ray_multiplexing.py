"""Ray Serve with a multiplexed deployment: replicas, models per replica, seconds per load."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve

REPLICAS, MODELS, LOAD_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=20)
class Models:
    def __init__(self) -> None:
        self.loads = 0

    @serve.multiplexed(max_num_models_per_replica=MODELS)
    async def get_model(self, model_id: str) -> str:
        self.loads += 1
        await asyncio.sleep(LOAD_S)
        return model_id

    async def __call__(self, request: Any) -> str:
        before = self.loads
        await self.get_model(serve.get_multiplexed_model_id())
        return str(self.loads - before)


def main() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ray.init(num_cpus=REPLICAS, log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"port": 8123})
    serve.run(Models.bind())
    print("http://127.0.0.1:8123/", flush=True)
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
