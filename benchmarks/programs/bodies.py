"""What ``bench_bodies.py`` serves; as a program, the Starlette application under uvicorn."""

from __future__ import annotations

import socket
import threading
import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

LARGE = bytes(10_000_000)


async def size(request: Request) -> Response:
    return Response(str(len(await request.body())))


async def large(request: Request) -> Response:
    return Response(LARGE)


app = Starlette(routes=[Route("/", size, methods=["POST"]), Route("/large", large)])


class AsyncSize:
    """Reads the body in chunks as they arrive."""

    async def __call__(self, request: Request) -> str:
        return str(len(await request.body()))


class PlainSize:
    """Gets the body when it is complete."""

    def __call__(self, request: Request) -> str:
        return str(len(request.body()))  # type: ignore[arg-type]


if __name__ == "__main__":
    import uvicorn

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    def print_address() -> None:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        print(f"http://127.0.0.1:{port}", flush=True)

    threading.Thread(target=print_address, daemon=True).start()
    uvicorn.run(app, port=port, log_level="error", access_log=False)
