"""Read the lengths of queues: of daskserve's tasks, and in Redis and RabbitMQ also in the layout of Celery
and Kombu."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from daskserve.cluster.protocols.base import TaskQueues
from daskserve.control.scaling.backlog import REPLY_TIMEOUT_S, QueueLength
from daskserve.errors import ServeError
from daskserve.options.queues import QueueOptions
from daskserve.payload.error_text import summary_of

#: Returns the response body of a GET with this username and password; see `fetching.HTTPFetcher`.
FetchAs = Callable[[str, tuple[str, str]], Awaitable[bytes]]

#: Kombu keeps tasks with a priority in separate lists, whose keys end in this separator and a digit.
PRIORITY_SEPARATOR = "\x06\x16"
PRIORITIES = range(1, 10)


def open_queue(options: QueueOptions, fetch: FetchAs, tasks: TaskQueues | None = None) -> QueueLength:
    """Return the queue at its broker, without connecting; ``tasks`` are the instance's own task queues."""
    if options.is_of_instance:
        return InstanceQueue(tasks, options.queue_name)
    if options.file is not None:
        return FileQueue(options.file, options.queue_name)
    return RabbitMQQueue(options, fetch) if options.is_rabbitmq else RedisQueue(options)


class InstanceQueue:
    """A queue of tasks that the instance keeps."""

    def __init__(self, tasks: TaskQueues | None, name: str) -> None:
        self._tasks, self._name = tasks, name

    async def read(self) -> float:
        """Return the number of tasks that are ready to run."""
        if self._tasks is None:
            raise ValueError("no instance stores queues of tasks")
        try:
            return float(await self._tasks.call("ready", [self._name]))
        except ServeError as error:
            raise ValueError(str(error)) from error

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class FileQueue:
    """A queue of `daskserve.data.tasks.queues.sqlite`, in a file of this machine."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = Path(os.path.expanduser(path)), name

    async def read(self) -> float:
        """Return the number of tasks that are ready to run; 0 if the file does not exist yet."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> float:
        if not self._path.exists():
            return 0.0
        try:
            with closing(sqlite3.connect(f"{self._path.as_uri()}?mode=rw", uri=True)) as connection:
                # place = 1 are ready tasks, place = 0 are delayed ones.
                found: tuple[int] = connection.execute(
                    "SELECT (SELECT count(*) FROM daskserve_tasks WHERE place = 1 AND queue = ?) + "
                    "(SELECT count(*) FROM daskserve_tasks WHERE place = 0 AND queue = ? "
                    "AND due_at <= (julianday('now') - 2440587.5) * 86400.0)",
                    (self._name, self._name),
                ).fetchone()
                return float(found[0])
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class RedisQueue:
    """A Redis list with Kombu's priority lists, and the daskserve task queue of the same name."""

    def __init__(self, options: QueueOptions) -> None:
        name = options.queue_name
        self._url = options.url
        self._keys = [name, *(f"{name}{PRIORITY_SEPARATOR}{each}" for each in PRIORITIES)]
        #: The key of the ready tasks of `daskserve.data.tasks.queues.redis_queue`, with the default prefix.
        self._tasks = f"{{daskserve}}:ready:{name}"
        #: The key of the delayed tasks. Only consumers move due tasks to the ready tasks.
        self._delayed = f"{{daskserve}}:delayed:{name}"
        self._client: Any = None

    async def read(self) -> float:
        """Return how many tasks wait; a missing list counts as empty."""
        redis = await _redis()
        try:
            if self._client is None:
                self._client = redis.asyncio.from_url(
                    self._url, socket_timeout=REPLY_TIMEOUT_S, socket_connect_timeout=REPLY_TIMEOUT_S
                )
            seconds, _ = await self._client.time()
            pipeline = self._client.pipeline(transaction=False)
            for key in self._keys:
                pipeline.llen(key)
            pipeline.zcard(self._tasks)
            pipeline.zcount(self._delayed, "-inf", seconds)
            return float(sum(await pipeline.execute()))
        except redis.RedisError as error:
            raise OSError(summary_of(error)) from error

    async def close(self) -> None:
        """Disconnect. The pool is kept, because it holds the TLS context, which takes 50 ms to create."""
        if self._client is not None:
            await self._client.connection_pool.disconnect()


async def _redis() -> Any:
    """Return the package ``redis``, which is an optional dependency."""
    try:
        # In a thread, because the first import takes some hundred milliseconds.
        await asyncio.to_thread(importlib.import_module, "redis.asyncio")
        return importlib.import_module("redis")
    except ImportError as error:
        raise ValueError(
            f'the Python package redis cannot be imported ({error}); pip install "daskserve[redis]" on every '
            "worker, because the controller may run on any of them"
        ) from error


class RabbitMQQueue:
    """A RabbitMQ queue; its length includes tasks that were delivered but not acknowledged."""

    def __init__(self, options: QueueOptions, fetch: FetchAs) -> None:
        asked = options.management()
        self._name, self._vhost = options.queue_name, asked.vhost
        self._where = asked.base
        self._url = f"{asked.base}/api/queues/{quote(asked.vhost, safe='')}/{quote(self._name, safe='')}"
        self._login = (asked.username, asked.password)
        self._fetch = fetch

    async def read(self) -> float:
        """Return the queue's number of ``messages``."""
        body = await self._fetch(self._url, self._login)
        try:
            answer: Any = json.loads(body)
        except ValueError:
            raise ValueError(
                f"{self._where} is not RabbitMQ's management API; set rabbitmq_management_url"
            ) from None
        if isinstance(answer, dict) and "error" in answer:
            raise ValueError(self._error_text(answer))
        found = answer.get("messages") if isinstance(answer, dict) else None
        if isinstance(found, bool) or not isinstance(found, int):
            # This happens shortly after the queue was created, and if statistics are disabled.
            raise ValueError(f"the management API at {self._where} does not report the number of messages")
        return float(found)

    def _error_text(self, answer: dict[str, Any]) -> str:
        said = f"{answer['error']}: {answer.get('reason', 'no reason given')}"
        if answer["error"] in ("not_authorised", "not_authorized"):
            return f"the management API at {self._where} refuses the username or the password ({said})"
        if answer["error"] == "Object Not Found":
            return f"there is no queue {self._name!r} in the virtual host {self._vhost!r} of {self._where}"
        return f"the management API at {self._where} refuses the request ({said})"

    async def close(self) -> None:
        """Do nothing: no connection stays open between two reads."""
