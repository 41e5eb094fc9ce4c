"""FastAPI on uvicorn with uvicorn's worker processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import uvicorn
from fastapi import FastAPI

WORKERS = 2
app = FastAPI()


@app.get("/")
async def answer() -> str:
    return "ok"


def main() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    here = os.path.dirname(os.path.abspath(__file__))
    command = ["-m", "uvicorn", "fastapi_uvicorn:app", "--workers", str(WORKERS), "--port", str(port)]
    options = ["--app-dir", here, "--no-access-log", "--log-level", "error"]
    process = subprocess.Popen([sys.executable, *command, *options])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        time.sleep(2)  # until the second worker has started too
        print(f"http://127.0.0.1:{port}/", flush=True)
        process.wait()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    assert uvicorn
    main()
