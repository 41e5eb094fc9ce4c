"""A floor: Tornado's ``HTTPServer`` with a callback. With a port as an argument, it shares that port."""

from __future__ import annotations

import asyncio
import sys

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine
from tornado.netutil import bind_sockets

from daskserve.loops.event_loop import new_event_loop

BODY = b"ok"


def answer(request: HTTPServerRequest) -> None:
    connection = request.connection
    assert connection is not None
    headers = HTTPHeaders({"Content-Length": str(len(BODY)), "Content-Type": "text/plain"})
    connection.write_headers(ResponseStartLine("HTTP/1.1", 200, "OK"), headers, BODY)
    connection.finish()


async def main() -> None:
    sockets = bind_sockets(int(sys.argv[1]) if len(sys.argv) > 1 else 0, "127.0.0.1", reuse_port=True)
    HTTPServer(answer).add_sockets(sockets)
    print(f"http://127.0.0.1:{sockets[0].getsockname()[1]}/", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
