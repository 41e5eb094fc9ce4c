"""BentoML with two workers; it accepts only POST, on the path /answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import bentoml


@bentoml.service(workers=2, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Answer:
    @bentoml.api
    async def answer(self, a: int) -> str:
        return "ok"


def main() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ["-m", "bentoml", "serve", "bentoml_noop:Answer", "--port", str(port), "--quiet"]
    process = subprocess.Popen([sys.executable, *command], cwd=os.path.dirname(os.path.abspath(__file__)))
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").close()
                break
            except OSError:
                time.sleep(0.2)
        print(f"http://127.0.0.1:{port}/answer", flush=True)
        process.wait()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main()
