"""LitServe with its form of OpenAI's chat completions, and a model that makes a token every 5 ms."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import litserve


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


def announce() -> None:
    while True:
        try:
            urllib.request.urlopen("http://127.0.0.1:8125/health").close()
            break
        except OSError:
            time.sleep(0.2)
    print("http://127.0.0.1:8125", flush=True)


def end(*_: Any) -> None:
    """End the processes that LitServe has started, too."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    os.setpgrp()
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=announce, daemon=True).start()
    api = Paced(spec=litserve.OpenAISpec(), enable_async=True)
    litserve.LitServer(api, accelerator="cpu").run(port=8125, generate_client_file=False, log_level="error")
