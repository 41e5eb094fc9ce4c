"""Ray Serve with chat completions in OpenAI's form: an ingress that reads the stream of a model."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from ray import serve

# No postponed annotations here: FastAPI could not resolve them in the replica.
app = FastAPI()


class Body(BaseModel):
    """A request."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = 16
    stream: bool = False


@serve.deployment(max_ongoing_requests=1000)
class Model:
    """Makes a token every 5 ms."""

    async def generate(self, count: int) -> AsyncIterator[str]:
        for _ in range(count):
            await asyncio.sleep(0.005)
            yield "word "


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(app)
class Ingress:
    """Answers in OpenAI's form."""

    def __init__(self, model: Any) -> None:
        self.model = model.options(stream=True)

    @app.post("/v1/chat/completions")
    async def complete(self, body: Body) -> StreamingResponse:
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: Body) -> AsyncIterator[str]:
        async for token in self.model.generate.remote(body.max_tokens):
            choice = {"index": 0, "delta": {"content": token}, "finish_reason": None}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


def main() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"port": 8124})
    serve.run(Ingress.bind(Model.bind()))
    print("http://127.0.0.1:8124", flush=True)
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
