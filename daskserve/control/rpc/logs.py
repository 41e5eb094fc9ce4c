"""The verbs for the logs of an instance: reading them from all workers, and changing the options."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import math
import zlib
from collections.abc import Mapping
from typing import Any

from daskserve.cluster.actors.calls import host_of
from daskserve.cluster.protocols.base import ANSWER_S, verb
from daskserve.control.core import MAX_WAIT_S
from daskserve.control.decisions.history.events import WHOLE
from daskserve.control.decisions.target_capacity import set_logging
from daskserve.control.rpc.locking import LockingVerbs
from daskserve.errors import BadRequestError, ServeError
from daskserve.options.fields.base import parse_options
from daskserve.options.logging import LoggingConfig
from daskserve.telemetry.logs.ring import Query

#: Maximum number of records in one answer.
MAX_RECORDS = 10_000
#: Maximum number of workers that are queried at a time, which limits the memory for their answers.
WORKERS_AT_A_TIME = 32
#: Time limit for the answers of all workers.
ALL_S = 10.0
#: Interval of the queries while a call waits for records.
ASK_EVERY_S = 0.5
#: Maximum size of an unpacked cursor in bytes.
MAX_CURSOR = 4 << 20
#: The values of a row other than the fields of a record.
_INTERNAL = frozenset({"levelno", "number", "source", "turn", "instance"})


class LogVerbs(LockingVerbs):
    """The verbs for the logs of an instance."""

    @verb
    async def set_logging(self, config: Mapping[str, Any], by: str = "") -> dict[str, Any]:
        """Change the logging options of the instance, for its proxies, replicas and controller."""
        checked = parse_options(LoggingConfig, config, what="logging_config").model_dump(mode="json")
        core = self._core
        async with self._deciding():
            change = set_logging(core.state, {"logging_config": checked}, core.start_message.start_id)
            await core.writer.commit(change, causes={WHOLE: by})
        core.loop.reconfigure_replicas()
        return {"snapshot": await core.barrier()}

    @verb
    async def logs(
        self,
        application: str | None = None,
        deployment: str | None = None,
        replica: str | None = None,
        since_s: float | None = None,
        level: str | None = None,
        grep: str | None = None,
        limit: int = 1000,
        after: str | None = None,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Return log records in the order of their times, and a cursor after which the next call continues.

        Parameters
        ----------
        replica : str, optional
            The tag of a replica, or its part after ``#``.
        since_s : float, optional
            Only records of the last ``since_s`` seconds.
        level : str, optional
            The lowest level.
        grep : str, optional
            A string that the message, the traceback, or the id of the request or of its trace contains.
        after : str, optional
            The cursor of an earlier answer, for the records after it, oldest first. None: the newest records.
        wait_s : float
            How long to wait, at most 30 s, if there are none.

        Returns
        -------
        dict
            ``records``, ``next``, ``missing`` (workers that did not answer, with the reason), ``dropped``
            (how many records each worker lost, by the reason) and ``problems`` (files that are not written).
        """
        if level is not None and level.upper() not in logging.getLevelNamesMapping():
            raise BadRequestError(f"level={level!r} is not a level of logging, such as 'WARNING'")
        if not 0 < limit <= MAX_RECORDS:
            raise BadRequestError(f"limit={limit!r} must be from 1 to {MAX_RECORDS}")
        since = None if since_s is None else self._core.clock.wall() - since_s
        _check_time("since_s", since_s)
        _check_time("wait_s", wait_s)
        instance = self._core.cluster.instance
        query = Query(application, deployment, replica, since, level, grep, limit, instance)
        cursor = None if after is None else unpacked(after)
        deadline = self._core.clock.now() + min(wait_s, MAX_WAIT_S)
        while True:
            found = await self._gather(query, cursor)
            left_s = deadline - self._core.clock.now()
            if found["records"] or left_s <= 0:
                return {**found, "next": packed(found["next"])}
            cursor = found["next"]
            await self._core.clock.sleep(min(ASK_EVERY_S, left_s))

    async def _gather(self, query: Query, cursor: Mapping[str, int] | None) -> dict[str, Any]:
        gathered = Gathered(query.limit, cursor)
        asking = asyncio.Semaphore(WORKERS_AT_A_TIME)

        async def ask(worker: str) -> None:
            async with asking:
                call = self._core.cluster.call(
                    host_of(worker),
                    "logs",
                    query=query.plain(),
                    after=None if cursor is None else dict(cursor),
                )
                try:
                    gathered.add(worker, await self._core.clock.wait_for(call, ANSWER_S))
                except TimeoutError:
                    gathered.missing[worker] = "it does not answer"
                except (ServeError, OSError, TypeError) as error:
                    # A worker whose answer cannot be sent must not hide the answers of the others.
                    gathered.missing[worker] = str(error)

        workers = sorted(self._core.observed.workers)
        tasks = [asyncio.create_task(ask(worker)) for worker in workers]
        try:
            await self._core.clock.wait_for(asyncio.gather(*tasks), ALL_S)
        except TimeoutError:
            for worker in workers:
                if worker not in gathered.answered:
                    gathered.missing.setdefault(worker, "there was no time left to ask it")
        finally:
            for task in tasks:
                task.cancel()
        return gathered.result()


class Gathered:
    """The answers of the workers, merged. Pure."""

    def __init__(self, limit: int, cursor: Mapping[str, int] | None) -> None:
        self._limit = limit
        self._cursor = cursor
        self._records: list[dict[str, Any]] = []
        self._last: dict[str, int] = dict(cursor or {})
        self._sources: set[str] = set()
        self.missing: dict[str, str] = {}
        self.answered: set[str] = set()
        self._dropped: dict[str, Mapping[str, int]] = {}
        self._problems: dict[str, list[str]] = {}

    def add(self, worker: str, answer: Mapping[str, Any]) -> None:
        """Add the answer of a worker, and drop the records beyond the limit."""
        self.answered.add(worker)
        for each in answer["sources"]:
            source = each["source"]
            self._last[source] = each["last"]
            self._sources.add(source)
            turn = 0.0
            for row in each["rows"]:
                # Sort by the latest time so far: a line of the access log gets its number late, and only the
                # last numbers of a source may be dropped.
                turn = max(turn, row["time"])
                self._records.append({**row, "worker": worker, "source": source, "turn": turn})
        if answer["dropped"]:
            self._dropped[worker] = answer["dropped"]
        if answer["problems"]:
            self._problems[worker] = answer["problems"]
        self._cut()

    def _cut(self) -> None:
        self._records.sort(key=lambda each: each["turn"])
        if self._cursor is None:
            del self._records[: max(0, len(self._records) - self._limit)]
            return
        for row in self._records[self._limit :]:
            # The next call returns this row.
            self._last[row["source"]] = min(self._last[row["source"]], row["number"] - 1)
        del self._records[self._limit :]

    def result(self) -> dict[str, Any]:
        """Return the answer, with an unpacked cursor."""
        self._records.sort(key=lambda each: each["time"])
        if not self.missing:
            # Forget the sources that have ended, such as child processes.
            self._last = {source: last for source, last in self._last.items() if source in self._sources}
        return {
            "records": [
                {name: value for name, value in each.items() if name not in _INTERNAL}
                for each in self._records
            ],
            "next": self._last,
            "missing": self.missing,
            "dropped": self._dropped,
            "problems": self._problems,
        }


def _check_time(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise BadRequestError(f"{name}={value!r} must be a number of seconds from 0")


def packed(cursor: Mapping[str, int]) -> str:
    """Return a cursor as a string for URLs."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(cursor).encode())).decode()


def unpacked(text: str) -> dict[str, int]:
    """Return the cursor that `packed` has turned into a string; raise `BadRequestError` if it is invalid."""
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.urlsafe_b64decode(text.encode()), MAX_CURSOR)
        found = json.loads(data) if not reader.unconsumed_tail else None
    except (ValueError, zlib.error, binascii.Error, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(type(each) is int for each in found.values()):
        raise BadRequestError(f"after={text[:40]!r} is not a cursor: pass 'next' of an earlier response")
    return found
