"""Brokers for tests: a real Redis, and an HTTP server that answers as RabbitMQ's management API does."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import redis
from dask_processes import PATIENCE_S, poll_for
from json_api import json_api

#: Skips tests without a Redis server; Debian's package is ``redis-server``.
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="Debian's package redis-server is not installed"
)


class Redis:
    """A Redis server with a password, on a loopback port, with its data in a folder."""

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
        """Start the server empty and wait until it answers."""
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
        """Stop the server if it runs."""
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
        """Return a client; use it in a ``with`` block, which closes it."""
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
    """Answer like RabbitMQ for queues by path (virtual host and queue name); yield the URL."""
    expected = f"Basic {base64.b64encode(login.encode()).decode()}"

    def answer(path: str, headers: Message) -> tuple[int, Any]:
        if headers.get("Authorization") != expected:
            return 401, {"error": "not_authorised", "reason": "Login failed"}
        name = path.removeprefix("/api/queues/")
        if name not in lengths:
            return 404, {"error": "Object Not Found", "reason": "Not Found"}
        length = lengths[name]
        counts = {"messages": length, "messages_ready": length, "messages_unacknowledged": 0}
        return 200, {"name": name.rpartition("/")[2], "state": "running", **counts}

    with json_api(answer) as url:
        yield url
