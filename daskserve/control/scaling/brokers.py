"""The lengths of queues at Redis and at RabbitMQ, as Celery and Kombu keep them."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from daskserve.control.scaling.backlog import REPLY_S, QueueLength
from daskserve.options.queues import QueueOptions

#: Returns the body of the response to a GET with this name and password; see `fetching.HTTPFetcher`.
FetchAs = Callable[[str, tuple[str, str]], Awaitable[bytes]]

#: Kombu keeps tasks with a priority in lists beside the queue's own, whose keys end in this and a digit.
PRIORITY_SEPARATOR = "\x06\x16"
PRIORITIES = range(1, 10)


def open_queue(options: QueueOptions, fetch: FetchAs) -> QueueLength:
    """Return the queue at its broker; nothing is connected yet."""
    return RabbitMQQueue(options, fetch) if options.is_rabbitmq else RedisQueue(options)


class RedisQueue:
    """A list in Redis, with the lists of Kombu's priorities."""

    def __init__(self, options: QueueOptions) -> None:
        name = options.queue_name
        self._url = options.broker_url
        self._keys = [name, *(f"{name}{PRIORITY_SEPARATOR}{each}" for each in PRIORITIES)]
        self._client: Any = None

    async def read(self) -> float:
        """Return how many tasks are in the lists; a list that does not exist is an empty one."""
        redis = await _redis()
        try:
            if self._client is None:
                self._client = redis.asyncio.from_url(
                    self._url, socket_timeout=REPLY_S, socket_connect_timeout=REPLY_S
                )
            pipeline = self._client.pipeline(transaction=False)
            for key in self._keys:
                pipeline.llen(key)
            return float(sum(await pipeline.execute()))
        except redis.RedisError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Hang up. The pool stays, as its connections keep their TLS context, which takes 50 ms to make."""
        if self._client is not None:
            await self._client.connection_pool.disconnect()


async def _redis() -> Any:
    """Return the package ``redis``, which is not everybody's."""
    try:
        # In a thread: it takes some hundred milliseconds the first time.
        await asyncio.to_thread(importlib.import_module, "redis.asyncio")
        return importlib.import_module("redis")
    except ImportError as error:
        raise ValueError(
            f"the Python package redis cannot be imported ({error}); on every worker, as the controller may "
            'run on any, pip install "daskserve[redis]"'
        ) from error


class RabbitMQQueue:
    """A queue of RabbitMQ, with the tasks that were taken and are not acknowledged yet."""

    def __init__(self, options: QueueOptions, fetch: FetchAs) -> None:
        asked = options.management()
        self._name, self._vhost = options.queue_name, asked.vhost
        self._where = asked.base
        self._url = f"{asked.base}/api/queues/{quote(asked.vhost, safe='')}/{quote(self._name, safe='')}"
        self._login = (asked.username, asked.password)
        self._fetch = fetch

    async def read(self) -> float:
        """Return the queue's ``messages``."""
        body = await self._fetch(self._url, self._login)
        try:
            answer: Any = json.loads(body)
        except ValueError:
            raise ValueError(
                f"what answers at {self._where} is not RabbitMQ's management API; set rabbitmq_management_url"
            ) from None
        if isinstance(answer, dict) and "error" in answer:
            raise ValueError(self._refusal(answer))
        found = answer.get("messages") if isinstance(answer, dict) else None
        if isinstance(found, bool) or not isinstance(found, int):
            # So it is for a moment after the queue was made, and where statistics are switched off.
            raise ValueError(f"the management API at {self._where} does not tell its number of messages")
        return float(found)

    def _refusal(self, answer: dict[str, Any]) -> str:
        said = f"{answer['error']}: {answer.get('reason', 'no reason given')}"
        if answer["error"] in ("not_authorised", "not_authorized"):
            return f"the management API at {self._where} refuses the name or the password ({said})"
        if answer["error"] == "Object Not Found":
            return f"there is no queue {self._name!r} in the virtual host {self._vhost!r} of {self._where}"
        return f"the management API at {self._where} refuses to tell ({said})"

    async def close(self) -> None:
        """Nothing stays open between two reads."""
