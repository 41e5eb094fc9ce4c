"""The floor of streams: Tornado's ``HTTPServer`` with a callback that writes chunks of equal size.

Arguments: the number of chunks and their size in bytes. Every chunk begins with its number, as in
``bench_streams.py``.
"""

from __future__ import annotations

import asyncio
import sys

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine
from tornado.netutil import bind_sockets

from daskserve.loops.event_loop import new_event_loop

COUNT, SIZE_BYTES = int(sys.argv[1]), int(sys.argv[2])


async def stream(request: HTTPServerRequest) -> None:
    connection = request.connection
    assert connection is not None
    headers = HTTPHeaders({"Content-Type": "text/plain"})
    await connection.write_headers(ResponseStartLine("HTTP/1.1", 200, "OK"), headers)
    for number in range(COUNT):
        await connection.write(b"%08d" % number + bytes(SIZE_BYTES - 8))
    connection.finish()


async def main() -> None:
    tasks: set[asyncio.Task[None]] = set()

    def answer(request: HTTPServerRequest) -> None:
        task = asyncio.create_task(stream(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    sockets = bind_sockets(0, "127.0.0.1")
    HTTPServer(answer).add_sockets(sockets)
    print(f"http://127.0.0.1:{sockets[0].getsockname()[1]}/", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
