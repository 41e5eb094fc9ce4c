"""mosec with one worker, which accepts only POST, on the path /inference."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

from mosec import Server, Worker


class Answer(Worker):
    def forward(self, data: Any) -> Any:
        return "ok"


def print_address(port: int) -> None:
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    time.sleep(2)
    print(f"http://127.0.0.1:{port}/inference", flush=True)


if __name__ == "__main__":
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    threading.Thread(target=print_address, args=(port,), daemon=True).start()
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    server = Server()
    server.append_worker(Answer, num=1)
    server.run()
