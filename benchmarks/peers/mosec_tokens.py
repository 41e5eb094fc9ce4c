"""mosec, which streams tokens by server-sent events, in fixed batches of 8: for ``bench_tokens.py``."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Any

from mosec import Runtime, Server, SSEWorker

SLOTS, WAIT_MS = 8, 10
#: Between the first connection and the first answer.
START_S = 4


class Writer(SSEWorker):
    def __init__(self) -> None:
        super().__init__()
        self._step_s = float(os.environ["STEP_S"])

    def forward(self, data: list[Any]) -> list[Any]:
        counts = [int(each["count"]) for each in data]
        for number in range(max(counts)):
            time.sleep(self._step_s)
            for index, count in enumerate(counts):
                if number < count:
                    self.send_stream_event("token", index=index)
        return data


def print_address(port: int) -> None:
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    time.sleep(START_S)
    print(f"http://127.0.0.1:{port}/tokens", flush=True)


if __name__ == "__main__":
    os.environ["STEP_S"] = sys.argv[1]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    threading.Thread(target=print_address, args=(port,), daemon=True).start()
    sys.argv[1:] = [
        "--address",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--timeout",
        "600000",
    ]
    server = Server()
    runtime = Runtime(Writer, num=1, max_batch_size=SLOTS, max_wait_time=WAIT_MS, timeout=600)
    server.register_runtime({"/tokens": [runtime]})
    server.run()
