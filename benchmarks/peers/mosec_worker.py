"""mosec, which accepts only POST, on the path /inference.

Without arguments, one worker answers "ok". With ``digits``, two workers run the model of ``bench_apps.py``,
in batches with the wait of ``programs/apps.py``, and of the size there or of the number that follows.
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


class Answer(Worker):
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
    has_model = sys.argv[1:2] == ["digits"]
    batch_size = int(sys.argv[2]) if len(sys.argv) > 2 else BATCH_SIZE
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    threading.Thread(target=print_address, args=(port,), daemon=True).start()
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    server = Server()
    if has_model:
        server.append_worker(Digits, num=2, max_batch_size=batch_size, max_wait_time=BATCH_WAIT_MS)
    else:
        server.append_worker(Answer, num=1)
    server.run()
