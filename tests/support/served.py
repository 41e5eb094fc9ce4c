"""Definitions that tests serve by import path or that workers must be able to import."""

from __future__ import annotations

import os
from typing import Any


def echo(request: Any) -> str:
    """Answer with the query parameter ``text``."""
    return str(request.query_params.get("text", "nothing"))


class Counter:
    """Answers with its process id and the number of calls, which starts at a given number."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def __call__(self, request: Any) -> list[int]:
        self.count += 1
        return [os.getpid(), self.count]


class NotOnTheOtherSide(Exception):
    """An error of user code with its own fields."""

    def __init__(self, reason: str, *, code: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    """Answer HTTP requests with the path below the route; has no lifespan."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})
