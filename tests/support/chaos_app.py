"""The application that chaos runs deploy; workers and replicas import it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocket

import daskserve as serve

WORK_S = 0.03
CHUNKS, CHUNK_S = 10, 0.05


class Target:
    """Records each request in a file, with the processes in which it runs, and answers with its version."""

    def __init__(self, version: int, notes: str) -> None:
        self._version = version
        self._notes = notes

    def note(self, request_id: str) -> None:
        # A short write to the end of a file is atomic, even if the process is killed right after it.
        line = f"{request_id} {os.getpid()} {os.getppid()}\n".encode()
        file = os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    async def call(self, request_id: str) -> int:
        self.note(request_id)
        await asyncio.sleep(WORK_S)
        return self._version

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._echo(WebSocket(scope, receive, send))
            return
        if scope["type"] != "http":
            return
        request = Request(scope, receive, send)
        self.note(request.query_params["id"])
        if request.query_params.get("kind") == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(WORK_S)
        count = CHUNKS if request.query_params["kind"] == "stream" else 1
        await StreamingResponse(self._lines(count))(scope, receive, send)

    async def _lines(self, count: int) -> AsyncIterator[str]:
        for number in range(count):
            if number:
                await asyncio.sleep(CHUNK_S)
            yield f"{self._version}\n"

    async def _echo(self, socket: WebSocket) -> None:
        self.note(socket.query_params["id"])
        await socket.accept()
        for _ in range(CHUNKS):
            await socket.receive_text()
            await socket.send_text(f"{self._version}")
        await socket.close()


def app(args: Mapping[str, Any]) -> Any:
    """Build the application of a chaos run's file."""
    return serve.deployment(name="target")(Target).bind(args["version"], args["notes"])


def requests_in_process(dask_worker: Any = None) -> dict[str, float]:
    """Return the gauges of requests that run or wait in this process, if they are not zero."""
    from prometheus_client import REGISTRY

    found = {
        metric.name: sum(each.value for each in metric.samples)
        for metric in REGISTRY.collect()
        if metric.name.startswith("daskserve")
        and metric.name.endswith(("_ongoing_requests", "_queued_requests"))
    }
    return {name: value for name, value in found.items() if value and "_max_" not in name}
