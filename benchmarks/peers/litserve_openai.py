"""LitServe with its form of OpenAI's chat completions, and a model that makes a token every 5 ms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import litserve
from litserve_server import serve


class Paced(litserve.LitAPI):
    """Makes a token every 5 ms."""

    def setup(self, device: str) -> None: ...

    async def decode_request(self, request: Any) -> int:
        return int(request.max_tokens)

    async def predict(self, count: int) -> AsyncIterator[str]:
        for _ in range(count):
            await asyncio.sleep(0.005)
            yield "word "

    async def encode_response(self, outputs: Any) -> AsyncIterator[dict[str, str]]:
        async for text in outputs:
            yield {"role": "assistant", "content": text}


if __name__ == "__main__":
    api = Paced(spec=litserve.OpenAISpec(), enable_async=True)
    serve(api)
