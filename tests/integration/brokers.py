"""Brokers for tests: a real Redis, and an HTTP server that answers as RabbitMQ's management API does."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from dask_processes import PATIENCE_S, poll_for

#: For tests that need Redis' server; it is Debian's package of that name.
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="Debian's package redis-server is not installed"
)


class Redis:
    """A Redis that needs a password, on a port of loopback, with all it writes in a folder."""

    def __init__(self, folder: Path, password: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self.url = f"redis://:{password}@127.0.0.1:{self.port}/0"
        self._password = password
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = folder / "redis.sock"

    def start(self) -> None:
        """Start it with nothing in it; return once it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--requirepass", self._password, "--dir", str(self._folder)]
        command += ["--unixsocket", str(self.socket)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        poll_for(self._answers, what="redis-server does not answer")

    def _answers(self) -> bool:
        try:
            with self.connect() as connection:
                return bool(connection.ping())
        except redis.ConnectionError:
            return False

    def stop(self) -> None:
        """End it, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()

    def connect(self) -> Any:
        """Return a client, to be closed by ``with``."""
        return redis.Redis.from_url(self.url)


@contextmanager
def redis_server(folder: Path, password: str) -> Iterator[Redis]:
    """Run Redis until the block ends."""
    server = Redis(folder, password)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def management_api(lengths: Mapping[str, int], login: str) -> Iterator[str]:
    """Answer as RabbitMQ does about the queues at these paths, each the virtual host's and its own name."""
    expected = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != expected:
                return self.send(401, {"error": "not_authorised", "reason": "Login failed"})
            path = self.path.removeprefix("/api/queues/")
            if path not in lengths:
                return self.send(404, {"error": "Object Not Found", "reason": "Not Found"})
            length = lengths[path]
            told = {"messages": length, "messages_ready": length, "messages_unacknowledged": 0}
            self.send(200, {"name": path.rpartition("/")[2], "state": "running", **told})

        def send(self, status: int, answer: Mapping[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
