"""An open loop of requests: they are sent at random times at a given rate, however slow the answers are.

``python open_loop.py URL RATE SECONDS`` posts images of 64 pixels and prints as JSON how many requests it has
sent, and the latencies in seconds of those after the warm-up. They count from when a request was due, so a
server that stalls is charged for all that had to wait. One thread does everything, with `select`, whose
timeout is exact, unlike that of event loops.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import time
from collections import deque
from urllib.parse import SplitResult, urlsplit

#: Requests sent in this time are not counted.
WARM_S = 1.0
#: How long answers may take after the last request.
PATIENCE_S = 10.0


def request_of(place: SplitResult, number: int) -> bytes:
    """Return a request, of which no two are the same."""
    pixels = [(number * 7919 + at * 104729) % 17 for at in range(64)]
    body = json.dumps({"pixels": pixels}).encode()
    head = (
        f"POST {place.path}?n={number} HTTP/1.1\r\nHost: {place.netloc}\r\nX-Client: {number * 65537:08x}\r\n"
    )
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def is_whole(answer: bytes) -> bool:
    """Return whether an answer is complete; only 200 with an announced length is expected."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a request failed: {answer!r}")
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return len(body) >= next(int(value) for name, _, value in lines if name == b"content-length")


def run(url: str, rate: float, seconds: float) -> tuple[int, list[float]]:
    """Send requests; return their number, and the latencies of those after the warm-up."""
    place = urlsplit(url)
    rng = random.Random(1)
    times, due = [], 0.0
    while (due := due + rng.expovariate(rate)) < WARM_S + seconds:
        times.append(due)
    requests = deque((each, request_of(place, number)) for number, each in enumerate(times))
    idle: list[socket.socket] = []
    busy: dict[socket.socket, tuple[float, bytearray]] = {}

    def take() -> socket.socket:
        # Servers close connections that have been idle for some seconds.
        while idle:
            client = idle.pop()
            if not select.select([client], [], [], 0)[0]:
                return client
            client.close()
        return socket.create_connection((place.hostname, place.port))

    took: list[float] = []
    began = time.perf_counter()
    while requests or busy:
        now = time.perf_counter() - began
        while requests and requests[0][0] <= now:
            due, request = requests.popleft()
            client = take()
            busy[client] = (due, bytearray())
            client.sendall(request)
        left_s = requests[0][0] - (time.perf_counter() - began) if requests else PATIENCE_S
        readable, _, _ = select.select(list(busy), [], [], max(0.0, left_s))
        if not requests and not readable:
            raise RuntimeError(f"{len(busy)} requests have no answer")
        for client in readable:
            due, answer = busy[client]
            if not (data := client.recv(65536)):
                raise RuntimeError("a connection was closed before the answer")
            answer += data
            if is_whole(bytes(answer)):
                if due >= WARM_S:
                    took.append(time.perf_counter() - began - due)
                del busy[client]
                idle.append(client)
    return len(times), took


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))))
