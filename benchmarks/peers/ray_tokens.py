"""Ray Serve, which streams tokens in fixed batches of 8: for ``bench_tokens.py``."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from starlette.responses import StreamingResponse

SLOTS, WAIT_S = 8, 0.01


@serve.deployment(max_ongoing_requests=1000)
class Writer:
    """Makes a token for each text of a batch, step by step."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    @serve.batch(max_batch_size=SLOTS, batch_wait_timeout_s=WAIT_S)
    async def generate(self, counts: list[int]) -> AsyncIterator[list[Any]]:
        for number in range(max(counts)):
            await asyncio.sleep(self.step_s)
            yield ["data: token\n\n" if number < count else StopIteration for count in counts]

    async def __call__(self, request: Any) -> StreamingResponse:
        count = (await request.json())["count"]
        return StreamingResponse(self.generate(count), media_type="text/event-stream")


def main() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    # Small objects only: half of the memory of the machine is not needed.
    ray.init(num_cpus=2, object_store_memory=1 << 28, log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"port": 8126})
    serve.run(Writer.bind(float(sys.argv[1])))
    print("http://127.0.0.1:8126/", flush=True)
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
