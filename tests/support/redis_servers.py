"""A real Redis server for tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from dask_processes import PATIENCE_S, poll_for
from ports import free_port

SECRET = "s3cr3t"


class RedisServer:
    """A server with a password, which writes each change to its folder before it answers."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("needs Debian's package redis-server")
        self._port = free_port()
        self._folder = folder
        self.url = f"redis://:{SECRET}@127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self._port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder), "--appendonly", "yes", "--requirepass", SECRET]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        poll_for(self._answers, what="redis-server does not answer")

    def _answers(self) -> bool:
        # It first loads its data.
        with suppress(redis.RedisError), redis.Redis.from_url(self.url) as connection:
            return bool(connection.ping())
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Yield the URL of a server."""
    server = RedisServer(folder)
    try:
        yield server.url
    finally:
        server.kill()
