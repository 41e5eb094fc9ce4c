"""The two versions of a backend during a rollout: which one gets a request, and how its requests end.

Each version has its own replica set. The router counts the requests of each version, because it sees lost
replicas, full queues and missed deadlines as the caller does.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from daskserve.common.types import BackendTag, Envelope, EnvelopeKind, Message, Receive, Send, described
from daskserve.data.caller.choice import shard_draw
from daskserve.data.caller.routing.shadow import (
    ResponseComparer,
    SendTo,
    Shadow,
    ShadowResponse,
    send_with_copies,
)
from daskserve.data.caller.sessions import session_in
from daskserve.data.version_counts import is_socket, sent
from daskserve.errors import NotFoundError
from daskserve.telemetry.histogram import VersionCounter

#: The header that selects the version for one request, and the values that are accepted besides the versions'
#: names.
_HEADER = b"x-serve-version"
NEW, OLD = "candidate", "stable"
#: The suffix of the tag of the new version's replica set; no backend's tag ends with it.
_SUFFIX = "#candidate"


def candidate_of(tag: BackendTag) -> BackendTag:
    """Return the tag of the new version's replica set."""
    return f"{tag}{_SUFFIX}"


def backend_of(tag: BackendTag) -> BackendTag:
    """Return the backend of a replica set."""
    return tag.removesuffix(_SUFFIX)


class Versions:
    """The split of a backend's requests at one step of its rollout.

    Parameters
    ----------
    value : dict
        The rollout as the controller has published it.
    tag : str
        The tag of the backend.
    old, new : callable
        Send a request to each version.
    now : callable
        Returns the time, to measure latencies.
    """

    def __init__(
        self, value: Mapping[str, Any], tag: BackendTag, old: SendTo, new: SendTo, now: Callable[[], float]
    ) -> None:
        self._now = now
        self.key: str = value["key"]
        self._tag = tag
        self._send_to = {NEW: new, OLD: old}
        self._share: float = value["share"]
        self._names: list[str] = value["names"]
        self._sticky: str | None = value["sticky"]
        self._shadow: float = value.get("shadow", 0.0)
        self.comparer = ResponseComparer(value.get("compare"))
        self._counters = {NEW: VersionCounter(), OLD: VersionCounter()}

    def after(self, before: Versions | None) -> Versions:
        """Take over the comparisons of an earlier step of the same rollout; return this object."""
        if before is not None and before.key.partition("/")[0] == self.key.partition("/")[0]:
            self.comparer = before.comparer
        return self

    def choose(self, envelope: Envelope, shard_key: str, rng: random.Random) -> str | None:
        """Draw the version for a request; return None if the request names a version."""
        if self._named(envelope) is not None:
            return None
        key = shard_key or self._session_of(envelope)
        # The tag is included, so that this draw is independent of the draw of the backend with the same key.
        number = shard_draw(f"{key}\n{self._tag}") if key else rng.random()
        return NEW if number < self._share else OLD

    def is_copied(self, envelope: Envelope, rng: random.Random) -> bool:
        """Return whether a request to the old version is copied to the new one."""
        if not self._shadow or is_socket(envelope) or not self.comparer.has_room:
            return False
        return rng.random() < self._shadow

    def send(
        self, version: str | None, envelope: Envelope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, None]:
        """Send a request to the version that was drawn or named; only drawn requests are counted."""
        if version is None:
            return self._send_to[self._named(envelope) or OLD](envelope, receive, send)
        return self._count(version, envelope, receive, send)

    async def send_compared(
        self, send_copy: Callable[[ShadowResponse], Shadow], envelope: Envelope, receive: Receive, send: Send
    ) -> None:
        """Send a request to the old version and a copy to the new one, and compare the answers."""
        old, new = ShadowResponse(), ShadowResponse()

        def note(message: Message) -> Awaitable[None]:
            old.note(message)
            return send(message)

        self.comparer.begin()
        copy = send_copy(new)
        has_answer = True
        try:
            await send_with_copies([copy], partial(self.send, OLD), envelope, receive, note)
        except Exception as error:
            old.error = error
            raise
        except BaseException:
            has_answer = False  # the caller has left, but the copy may already have a whole answer
            raise
        finally:
            if has_answer:
                name = envelope.head["path" if envelope.kind is EnvelopeKind.HTTP else "method"]
                copy.tasks.spawn(self.comparer.compare(name, old, new, copy.task), "compare")
            else:
                self.comparer.skip()

    def _named(self, envelope: Envelope) -> str | None:
        """Return the version that a request names; None if it names none.

        Raises
        ------
        NotFoundError
            There is no version of that name.
        """
        headers = envelope.head.get("headers", ()) if envelope.kind is EnvelopeKind.HTTP else ()
        found: bytes = next((value for name, value in headers if name == _HEADER), b"")
        if not found:
            return None
        name = found.decode("latin-1")
        if name in (NEW, self._names[0]):
            return NEW
        if name in (OLD, self._names[1]):
            return OLD
        raise NotFoundError(
            f"{described(self._tag, 'Deployment')} has no version {name!r}; there are {NEW} "
            f"({self._names[0]}) and {OLD} ({self._names[1]})."
        )

    def _session_of(self, envelope: Envelope) -> str:
        """Return the name of an HTTP request's session; empty if it has none."""
        if self._sticky is None or envelope.kind is not EnvelopeKind.HTTP:
            return ""
        return session_in(envelope.head.get("headers", ()), self._sticky)

    async def _count(self, version: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        """Send a request, and count its outcome, unless its caller leaves."""
        began = self._now()

        def ended(has_failed: bool) -> None:
            duration_s = None if is_socket(envelope) else self._now() - began
            self._counters[version].count(has_failed, duration_s)

        await sent(self._send_to[version], envelope, receive, send, ended)

    def plain(self) -> dict[str, Any] | None:
        """Return the totals for the controller; None if no request has ended."""
        new, old = self._counters[NEW], self._counters[OLD]
        has_answers = bool(self.comparer.compared or self.comparer.failed)
        if not (new.requests or old.requests or has_answers):
            return None
        found = {"key": self.key, "new": new.plain(), "old": old.plain()}
        return {**found, "shadowed": self.comparer.plain()} if has_answers else found
