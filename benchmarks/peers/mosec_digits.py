"""The model of ``bench_apps.py`` in mosec: batches of the same size with the same wait, in two processes."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from mosec import Server, Worker
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

BATCH_SIZE, BATCH_WAIT_MS = 16, 2


class Digits(Worker):
    def __init__(self) -> None:
        digits = load_digits()
        self._model = LogisticRegression(max_iter=200).fit(digits.data / 16, digits.target)

    def forward(self, data: list[Any]) -> list[dict[str, int]]:
        found = self._model.predict(np.asarray([each["pixels"] for each in data]) / 16)
        return [{"digit": int(each)} for each in found]


def print_address(port: int) -> None:
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    time.sleep(4)
    print(f"http://127.0.0.1:{port}/inference", flush=True)


if __name__ == "__main__":
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    threading.Thread(target=print_address, args=(port,), daemon=True).start()
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    server = Server()
    server.append_worker(Digits, num=2, max_batch_size=BATCH_SIZE, max_wait_time=BATCH_WAIT_MS)
    server.run()
