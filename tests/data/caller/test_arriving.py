"""Requests among the arguments of calls, in programs without replicas."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, sys, threading
from daskserve.data.caller.calls.handle import Handle
from daskserve.payload.pickling import dump
from starlette.requests import Request

async def main():
    async def receive(lock=threading.Lock()):
        return {"type": "http.request", "body": b"all of it"}
    request = Request({"type": "http", "path": "/here", "query_string": b"", "headers": []}, receive)
    await request.body()
    request.state.lock = threading.Lock()
    assert not [name for name in sys.modules if name.startswith("daskserve.data.replica")]
    copy = dump(request).load()
    print(copy.url.path, await copy.body())

asyncio.run(main())
"""


def test_a_program_without_replicas_passes_a_request_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("/here b'all of it'\n", "")
