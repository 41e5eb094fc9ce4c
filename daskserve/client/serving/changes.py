"""Reports the changes of an instance, one line each, while a program serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

from daskserve.client.instance.calls import ControllerCalls
from daskserve.client.views.status import Status
from daskserve.common.formatting import counted
from daskserve.common.types import short_tag
from daskserve.errors import ClosedError, ServeError

logger = logging.getLogger("daskserve.client")

#: How often the status is read while something changes, and at other times, in case a notification was lost.
UNSETTLED_S, SETTLED_S = 1.0, 30.0
#: Number of replicas that a line names.
NAMED = 3


def changes(before: Status | None, after: Status) -> Iterator[str]:
    """Yield a line for each change between two statuses; without the first, describe the second."""
    if before is None:
        yield f"Serving at {', '.join(after.http_urls) or 'no address'}. Press Ctrl-C to stop."
        before = Status()
    else:
        yield from (f"Listening at {url}" for url in after.http_urls if url not in before.http_urls)
        yield from (f"No longer listening at {url}" for url in before.http_urls if url not in after.http_urls)
        if after.epoch > before.epoch:
            yield "The controller was replaced"
    for name in sorted({*before.backends, *after.backends}):
        line = _backend_change(name, before, after)
        if line:
            yield line
    for worker, routes in after.broken_routes.items():
        for other in sorted(set(routes) - set(before.broken_routes.get(worker, ()))):
            yield f"Worker {worker} does not reach {other} directly"
    for worker in after.unresponsive_workers:
        if worker not in before.unresponsive_workers:
            yield f"Worker {worker} does not answer"


def _backend_change(name: str, before: Status, after: Status) -> str:
    old, new = before.backends.get(name), after.backends.get(name)
    shown = short_tag(name)
    if new is None:
        # A different tag with the same name belongs to a newer version of the actor.
        is_replaced = any(short_tag(each) == shown for each in after.backends)
        return f"{'The previous version of ' if is_replaced else ''}{shown} was deleted"
    were, are = _running(before, name), _running(after, name)
    routes = after.routes(name)
    message = new.message.partition("\n")[0]
    if old == new and were == are and routes == before.routes(name):
        return ""
    notes = []
    if old is not None and old.version != new.version:
        notes.append(f"version {new.version}")
    if routes != before.routes(name):
        notes.append(f"at {', '.join(routes)}" if routes else "without a route")
    if old is not None:
        notes += [_named(are - were, "ready"), _named(were - are, "gone")]
    notes.append(message)
    text = "; ".join(note for note in notes if note)
    summary = f"{shown}: {new.status}, {new.running} of {counted(new.wanted, 'replica runs', 'replicas run')}"
    return f"{summary} ({text})" if text else summary


def _running(status: Status, backend: str) -> set[str]:
    return {each.name for each in status.replicas(backend) if each.state == "RUNNING"}


def _named(replicas: set[str], state: str) -> str:
    if len(replicas) > NAMED:
        return f"{counted(len(replicas), 'replica')} {state}"
    return f"{', '.join(sorted(map(short_tag, replicas)))} {state}" if replicas else ""


def is_settled(status: Status) -> bool:
    """Return whether all backends are healthy and all proxies listen."""
    return all(each.status == "HEALTHY" for each in status.backends.values()) and all(
        each.state == "RUNNING" for each in status.actors
    )


class ChangeReports:
    """Reports the changes of an instance; runs on the connection's loop.

    A notification only wakes the loop. The status says what has changed.
    """

    def __init__(self, calls: ControllerCalls, report: Callable[[str], None]) -> None:
        self._calls = calls
        self._report = report
        self._listener = calls.cluster_connection.cluster(calls.instance).listener
        self._woken = asyncio.Event()
        #: The functions that stop watching, by key.
        self._watches: dict[str, Callable[[], None]] = {}

    async def run(self) -> None:
        """Report changes until cancelled or until the instance ends."""
        ignore_workers = self._listener.on_worker_left(self._wake)
        try:
            await self._report_changes()
        finally:
            ignore_workers()
            self._watch(())

    async def _report_changes(self) -> None:
        self._watch(["routes"])
        before: Status | None = None
        while True:
            self._woken.clear()
            pause_s = UNSETTLED_S
            try:
                after = Status.of(await self._calls.call("status"))
            except ClosedError:
                return
            except (ServeError, OSError) as error:
                logger.info("The status is not known now and is asked for again: %s", error)
            else:
                for line in changes(before, after):
                    self._report(line)
                self._watch(["routes", *(f"backend/{tag}" for tag in after.backends)])
                before = after
                pause_s = SETTLED_S if is_settled(after) else UNSETTLED_S
            with suppress(TimeoutError):
                await self._calls.cluster_connection.clock.wait_for(self._woken.wait(), pause_s)

    def _watch(self, keys: Collection[str]) -> None:
        """Watch these published values, and no others."""
        for key in self._watches.keys() - set(keys):
            self._watches.pop(key)()
        for key in keys:
            if key not in self._watches:
                self._watches[key] = self._listener.watch(key, self._wake)

    def _wake(self, _: Any) -> None:
        self._woken.set()
