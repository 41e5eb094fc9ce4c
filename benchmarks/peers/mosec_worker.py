"""mosec, which accepts only POST, on the path /inference.

Without arguments, one worker answers "ok". With ``digits``, two workers run the model of ``bench_apps.py``,
in batches of the size and with the wait of ``programs/apps.py``.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

from mosec import Server, Worker

BATCH_SIZE, BATCH_WAIT_MS = 16, 2
#: Between the first connection and the first answer.
START_S = 4


class ReplicaRequest(Worker):
    def forward(self, data: Any) -> Any:
        return "ok"


class Digits(Worker):
    def __init__(self) -> None:
        from apps import classify

        self._classify = classify

    def forward(self, data: list[Any]) -> list[dict[str, int]]:
        return [{"digit": digit} for digit in self._classify([each["pixels"] for each in data])]


def print_address(port: int) -> None:
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    time.sleep(START_S)
    print(f"http://127.0.0.1:{port}/inference", flush=True)


if __name__ == "__main__":
    has_model = sys.argv[1:] == ["digits"]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    threading.Thread(target=print_address, args=(port,), daemon=True).start()
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    server = Server()
    if has_model:
        server.append_worker(Digits, num=2, max_batch_size=BATCH_SIZE, max_wait_time=BATCH_WAIT_MS)
    else:
        server.append_worker(ReplicaRequest, num=1)
    server.run()
