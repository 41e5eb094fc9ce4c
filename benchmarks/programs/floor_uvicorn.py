"""A floor: uvicorn with an application of three lines. With a port as an argument, it shares that port."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn

from daskserve.loops.event_loop import new_event_loop

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    await send({"type": "http.response.body", "body": b"ok"})


async def main() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0))
        sock.listen(1024)
        print(f"http://127.0.0.1:{sock.getsockname()[1]}/", flush=True)
        config = uvicorn.Config(
            app, loop="none", http="httptools", lifespan="off", interface="asgi3", log_config=None
        )
        config.access_log = False
        await uvicorn.Server(config).serve(sockets=[sock])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
