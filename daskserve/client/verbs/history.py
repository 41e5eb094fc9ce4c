"""The client's methods for revisions, rollback, events, logs and live metrics."""

from __future__ import annotations

import uuid
from typing import Any

from daskserve.client.instance.connection import Verbs
from daskserve.client.views.history import Event, Events, History
from daskserve.client.views.logs import Logs
from daskserve.common import settings
from daskserve.common.types import DEFAULT_APPLICATION

#: Maximum number of events that one call returns.
MAX_EVENTS = 1000


class HistoryVerbs(Verbs):
    """Methods of a `Client` for the history."""

    async def history(self, name: str = DEFAULT_APPLICATION) -> History:
        """Return the last ten revisions of an application, even for a day after it was deleted.

        Raises
        ------
        NotFoundError
            A `KeyError`: there is no such application.
        """
        return History.of(await self._call("history", app=name))

    async def live_metrics(self, wait_s: float = 4.0) -> dict[str, Any]:
        """Return the rates, latencies and queues of the last second.

        The instance measures only while a client requests live metrics. A rate needs two totals that are a
        second apart, so the first call takes two or three seconds; after that, call it once a second.

        Parameters
        ----------
        wait_s : float
            How long to wait, at most 30 s, until each replica and proxy is measured.

        Returns
        -------
        dict ``deployments`` by tag, ``replicas`` by id, ``calls`` from deployment to deployment and ``http``;
        None stands for an unknown value.
        """
        return dict(await self._call("live_metrics", wait_s=wait_s))

    async def rollback(
        self,
        name: str = DEFAULT_APPLICATION,
        revision: int | None = None,
        *,
        timeout_s: float | None = None,
        blocking: bool = True,
    ) -> int:
        """Deploy an earlier revision of an application again; return its number.

        Like every deploy, this is one change: all deployments, their options and the route change together.
        If it fails, the current revision keeps running. The rollback is a new revision, so you can roll it
        back as well.

        Parameters
        ----------
        revision : int, optional
            The number of the revision in `history`. Default: the revision that ran before the current one;
            during a deploy, the current one.
        timeout_s : float, optional
            As in `daskserve.run`.
        blocking : bool
            Whether to wait until the revision runs.

        Raises
        ------
        NotFoundError
            A `KeyError`: there is no such application or revision, or none that ran before.
        BadRequestError The revision has never run, or its code is no longer stored.
        """
        await self._share()
        request_id = uuid.uuid4().hex
        answer = await self._submit(
            "rollback",
            app=name,
            revision=revision,
            request_id=request_id,
            timeout_s=timeout_s,
            progress_timeout_s=settings.timeouts().change_s,
        )
        await self._complete(answer, blocking=blocking)
        return int(answer["rollback_of"])

    async def events(
        self,
        name: str | None = None,
        *,
        since_s: float | None = None,
        limit: int = MAX_EVENTS,
    ) -> list[Event]:
        """Return what happened to an instance, oldest first: at most the last 10,000 events of a day.

        Parameters
        ----------
        name : str, optional
            Only changes of this application.
        since_s : float, optional
            Only events of the last ``since_s`` seconds.
        limit : int
            Maximum number of events, up to 1,000; the newest are returned.
        """
        return list((await self._events(name, since_s=since_s, limit=limit)).events)

    async def _events(
        self,
        name: str | None,
        *,
        after: int | None = None,
        since_s: float | None = None,
        limit: int = MAX_EVENTS,
        wait_s: float = 0.0,
    ) -> Events:
        """Return events, and the number from which to continue; if there are none, wait up to ``wait_s``."""
        message = {"after": after, "application": name, "limit": limit, "since_s": since_s, "wait_s": wait_s}
        return Events.of(await self._call("events", **message))

    async def logs(
        self,
        application: str | None = None,
        deployment: str | None = None,
        replica: str | None = None,
        *,
        since_s: float | None = None,
        level: str | None = None,
        grep: str | None = None,
        limit: int = 1000,
        after: str | None = None,
        wait_s: float = 0.0,
    ) -> Logs:
        """Return log records of all workers, in the order of their times: the newest that are in memory.

        Parameters
        ----------
        application, deployment, replica : str, optional
            Only records of this application, deployment or replica: its tag, or the part after ``#``.
        since_s : float, optional
            Only records of the last ``since_s`` seconds.
        level : str, optional
            The lowest level, such as ``"WARNING"``.
        grep : str, optional
            A string that the message, the traceback, or the id of the request or of its trace contains.
        limit : int
            Maximum number of records, up to 10,000.
        after : str, optional
            ``next`` of an earlier answer, to get later records; the oldest first if there are more than
            ``limit``.
        wait_s : float
            How long to wait, at most 30 s, if there are no records.
        """
        return Logs.of(
            await self._call(
                "logs",
                application=application,
                deployment=deployment,
                replica=replica,
                since_s=since_s,
                level=level,
                grep=grep,
                limit=limit,
                after=after,
                wait_s=wait_s,
            )
        )
